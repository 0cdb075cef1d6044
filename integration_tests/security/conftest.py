"""Attacks against real listeners and clients; each prints its figure at the end of the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))

from victims import Victim

IS_LONG = os.environ.get("KVDEV_LONG") == "1"
FIGURES: list[str] = []


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that notes a figure of this attack for the end of the run."""
    return lambda text: FIGURES.append(f"{request.node.name}: {text}")


@pytest.fixture
def victim() -> Iterator[Callable[..., Victim]]:
    """Return a function that starts a process to attack; all of them end with the test."""
    started: list[Victim] = []

    def start(role: str, **options: object) -> Victim:
        started.append(Victim(role, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures."""
    for line in FIGURES:
        terminalreporter.write_line(line)
