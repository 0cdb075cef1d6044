"""Let the tests import the simulation's modules, and print its figures at the end."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "fakes"))

from figures import figure, pytest_terminal_summary

__all__ = ["figure", "pytest_terminal_summary"]
