"""Engines for every test here, each on the fake fabric and on real NIXL; makes `engines` importable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import Engine

from kv_nixl_agent.testing import FakeFabric


@pytest.fixture(params=["fake", "nixl"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """A maker of engines that are closed at the end."""
    fabric = FakeFabric() if request.param == "fake" else None
    made: list[Engine] = []

    def build(name: str, **options: Any) -> Engine:
        made.append(Engine(name, port_factory=fabric.port if fabric else None, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()
