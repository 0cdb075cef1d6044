"""Figures of a run: tests note them, and pytest prints them at its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Figure = Callable[[str], None]
_FIGURES: list[str] = []


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Return a function that notes a figure of this test."""
    return lambda text: _FIGURES.append(f"{request.node.name}: {text}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures of a folder's tests, each once."""
    while _FIGURES:
        terminalreporter.write_line(_FIGURES.pop(0))
