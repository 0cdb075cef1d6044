"""Engines for every test here: on the fake fabric; with the mark `EVERYWHERE`, with a step of lag and on real NIXL too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "fakes"))

from engines import Engine

from kv_nixl_agent import open_nixl
from kv_nixl_agent.testing import FakeFabric

FIGURES: list[str] = []


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that notes a figure of this test for the end of the run."""
    return lambda text: FIGURES.append(f"{request.node.name}: {text}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures."""
    for line in FIGURES:
        terminalreporter.write_line(line)


@pytest.fixture(params=["fake"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """A maker of engines that are closed at the end; `wrap` puts something in front of an engine's NIXL ports."""
    fabric = None if request.param == "nixl" else FakeFabric()
    made: list[Engine] = []

    def build(name: str, wrap: Callable[[Any], Any] | None = None, **options: Any) -> Engine:
        factory: Any = fabric.port if fabric else open_nixl
        plain = factory if wrap is None else lambda *given, **more: wrap(factory(*given, **more))
        made.append(Engine(name, port_factory=plain, has_lag=request.param == "fake-lag", **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()
