"""Makes the host's engines (`integration_tests/host/engines/fleets.py`) importable: the bodies are theirs, on another device."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "host" / "engines"))
