"""Real processes that are harmed on purpose; figures are printed at the end of the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

FIGURES: list[str] = []


@pytest.fixture
def figure() -> Callable[[str], None]:
    """Return a function that notes a line for the end of the run."""
    return FIGURES.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures."""
    if FIGURES:
        terminalreporter.section("deaths and resources")
        for line in FIGURES:
            terminalreporter.write_line(line)
