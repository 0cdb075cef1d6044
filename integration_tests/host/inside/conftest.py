"""Inside the host: its own deprecation warnings are not ours to fail on."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_nixl_agent.testing import FakeFabric

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "fakes"))
sys.path.append(str(Path(__file__).parents[2] / "never_wrong"))
sys.path.append(str(Path(__file__).parents[3] / "packages" / "kv-topology" / "tests" / "proof"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(autouse=True)
def lines_of_one_form() -> Iterator[None]:
    """Every line that a test causes begins with `kv-transfer: `, once and with no other name, and its place is its caller's."""
    importlib.import_module("vllm_adapter.host.connector")
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.addFilter(lambda line: bool(lines.append(line)))
    loggers = [logging.getLogger(name) for name in ("vllm.vllm_adapter", "kv_handshake", "kv_nixl_agent")]
    for each in loggers:
        each.addHandler(handler)
    yield
    for each in loggers:
        each.removeHandler(handler)
    for line in lines:
        assert re.match(r"kv-transfer: (?!kv-transfer|vllm.adapter: |vllm.adapter was)", line.getMessage()), (
            line.getMessage()
        )
        assert line.filename not in {"recorder.py", "pacing.py", "contextlib.py"}, (line.filename, line.getMessage())


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
    from made import maker

    # Without a prefix cache, so that what a prompt's pages hold is what this hand-over brought.
    yield from maker(
        lambda name, **options: FullEngine(tmp_path / name, monkeypatch, fabric, prefix_caching=False, **options)
    )
