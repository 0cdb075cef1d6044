"""Attacks against real listeners and clients; each prints its figure at the end of the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))

from figures import figure, pytest_terminal_summary
from made import maker
from victims import Victim
from zmtp import HostileServer

__all__ = ["figure", "hostile", "pytest_terminal_summary", "victim"]


@pytest.fixture
def victim() -> Iterator[Callable[..., Victim]]:
    """Return a function that starts a process to attack; all of them end with the test."""
    yield from maker(Victim)


@pytest.fixture
def hostile() -> Iterator[Callable[..., HostileServer]]:
    """Return a function that starts a server by what it does with a connection; all of them end with the test."""
    yield from maker(HostileServer)
