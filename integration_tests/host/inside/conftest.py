"""Inside the host: its own deprecation warnings are not ours to fail on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_nixl_agent.testing import FakeFabric

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[3] / "packages" / "kv-topology" / "tests" / "proof"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes the scheduler's half of an engine by a name and its options."""
    from engine import Engine

    return lambda name, **options: Engine(tmp_path / name, **options)


@pytest.fixture
def producer(make_engine: Callable[..., Any]) -> Any:
    """An engine that computes prompts for others."""
    return make_engine("P")


@pytest.fixture
def consumer(make_engine: Callable[..., Any]) -> Any:
    """An engine that reads prompts of others."""
    return make_engine("D")


@pytest.fixture(params=["fake", "nixl"])
def fabric(request: pytest.FixtureRequest) -> FakeFabric | None:
    """NIXL's fake, and None for NIXL itself."""
    return FakeFabric() if request.param == "fake" else None


@pytest.fixture
def make(fabric: FakeFabric | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a whole engine by a name and its options; all are closed at the end."""
    from full_engine import FullEngine

    made: list[FullEngine] = []

    def build(name: str, **options: Any) -> FullEngine:
        # Without a prefix cache, so that what a prompt's pages hold is what this hand-over brought.
        made.append(FullEngine(tmp_path / name, monkeypatch, fabric, prefix_caching=False, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()
