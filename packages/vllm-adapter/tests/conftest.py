"""Makes the modules beside the tests importable, and kv-topology's byte oracle."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_handshake import Listener
from vllm_adapter.observe import answers

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "kv-topology" / "tests" / "proof"))
sys.path.append(str(Path(__file__).parents[3] / "integration_tests" / "fakes"))

from zeros import every_code_has_a_zero

__all__ = ["every_code_has_a_zero"]


@pytest.fixture
def bench() -> Any:
    """Return the consumer's coordinator between recording fakes."""
    return importlib.import_module("read_bench").Bench()


@pytest.fixture
def no_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep real engines of this machine out of sight; return the folder that engines and commands use here."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(answers, "_TEMPORARY", tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    return tmp_path / "vllm-adapter"


@pytest.fixture
def serve(no_engines: Path) -> Iterator[Callable[..., answers.StatusSocket]]:
    """Open sockets as processes of engines of this machine do; return the function that opens one."""
    del no_engines
    opened: list[answers.StatusSocket] = []

    def run(answer: Any, part: str = "scheduler", **more: Any) -> answers.StatusSocket:
        opened.append(answers.StatusSocket(part, {**more, "status": answer if callable(answer) else lambda: answer}))
        assert opened[-1].open()
        return opened[-1]

    yield run
    for each in opened:
        each.close()


@pytest.fixture
def listen() -> Iterator[Callable[..., str]]:
    """Serve envelopes by rank on a real listener; return its address."""
    listeners: list[Listener] = []

    def run(frames: dict[tuple[int, int], bytes], **options: Any) -> str:
        listeners.append(Listener("127.0.0.1", 0, payloads=frames, **options))
        listeners[-1].start()
        return f"127.0.0.1:{listeners[-1].port}"

    yield run
    for each in listeners:
        each.close()
