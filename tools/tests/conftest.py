"""Makes `kvdev` and the modules beside the tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])
sys.path.append(str(Path(__file__).resolve().parents[2] / "packages" / "kv-topology" / "tests" / "proof"))
