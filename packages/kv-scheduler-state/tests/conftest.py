"""Shared builders; see `scheduler_helpers.py` for what they make."""

import sys
from pathlib import Path

# Tests are collected with importlib, which does not put their folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
