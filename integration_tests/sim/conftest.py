"""Engines for every test here: on the fake fabric; with the mark `EVERYWHERE`, with a step of lag and on real NIXL too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "fakes"))

from engines import Engine
from figures import figure, pytest_terminal_summary
from made import maker
from zeros import every_code_has_a_zero

from kv_nixl_agent import open_nixl
from kv_nixl_agent.testing import FakeFabric

__all__ = ["every_code_has_a_zero", "figure", "make", "pytest_terminal_summary"]


@pytest.fixture(params=["fake"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """A maker of engines that are closed at the end."""
    fabric = None if request.param == "nixl" else FakeFabric()
    factory: Any = fabric.port if fabric else open_nixl
    yield from maker(partial(Engine, port_factory=factory, has_lag=request.param == "fake-lag"))
