"""The generation of an engine whose ranks live on several nodes: every node has an instance id, one of them counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed import parallel_state

from vllm_adapter.host import vllm as seam


class _Group:
    """A process group in which rank 0 says the same to all."""

    def __init__(self, said_by_rank_0: str) -> None:
        self._said = said_by_rank_0

    def broadcast_object(self, _mine: str, src: int) -> str:
        assert src == 0
        return self._said


@pytest.mark.never_wrong("B6")
@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_of_a_second_node_take_the_generation_of_the_first(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: _Group("node-0"))
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: _Group("node-0"))
    config: Any = SimpleNamespace(instance_id="node-1", parallel_config=SimpleNamespace(pipeline_parallel_size=stages))
    assert seam._shared_instance_id(config) == "node-0"


@pytest.mark.never_wrong("B3")
def test_a_generation_survives_a_router_that_keeps_numbers_as_doubles() -> None:
    generations = [seam._generation("engine", str(n)) for n in range(1000)]
    assert all(int(float(generation)) == generation for generation in generations)
    assert len(set(generations)) == len(generations)
