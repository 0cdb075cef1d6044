"""Makes the modules beside the tests importable, and kv-topology's byte oracle."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

settings.register_profile("noisy-machine", deadline=None)
settings.load_profile("noisy-machine")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "kv-topology" / "tests" / "proof"))
