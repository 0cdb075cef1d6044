"""Let the tests import the simulation's modules, and print its figures at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "fakes"))

FIGURES: list[str] = []


@pytest.fixture
def figures() -> list[str]:
    """Lines to print at the end of the run."""
    return FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures."""
    for line in FIGURES:
        terminalreporter.write_line(line)
