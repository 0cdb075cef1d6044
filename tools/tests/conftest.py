"""Makes `kvdev` and the modules beside the tests importable, and prints lines that tests leave for the end of the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])

_FIGURES: list[str] = []


@pytest.fixture
def figures() -> list[str]:
    """Lines to print at the end of the run."""
    return _FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines."""
    for line in _FIGURES:
        terminalreporter.write_line(line)
