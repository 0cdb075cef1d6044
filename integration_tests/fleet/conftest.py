"""Makes the modules beside the tests importable, and keeps one plain engine, which answers for all fleets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from judging import Alone, fleet_python, started_alone
from two_by_two import TwoByTwo, started_two_by_two

from kvdev.engines import Launch
from kvdev.forked import started_starter


@pytest.fixture(scope="session")
def launch() -> Iterator[Launch]:
    """Import vLLM once, in the background: engines that no other project starts are forks of that process."""
    with started_starter(fleet_python()) as starter:
        yield starter.launch


@pytest.fixture(scope="session")
def alone(launch: Launch) -> Iterator[Alone]:
    """Answers of an engine without a connector: they are right."""
    with started_alone(launch) as engine:
        yield engine


@pytest.fixture(scope="session")
def two_by_two(alone: Alone, launch: Launch) -> Iterator[TwoByTwo]:  # noqa: ARG001  (the plain engine has ended by then)
    """Four engines for all tests that put a router in front of them."""
    with started_two_by_two(launch) as fleet:
        yield fleet
