"""Makes helper modules beside the tests importable, and the byte oracle, which other packages' tests use too."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "proof")]
