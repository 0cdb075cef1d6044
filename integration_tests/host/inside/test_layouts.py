"""The recorded cache layouts are what this vLLM allocates, and the host seam reads them as the recorded tests do."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import vllm

TESTS = Path(__file__).resolve().parents[3] / "packages" / "vllm-adapter" / "tests"
RECORDING = json.loads((TESTS / "data" / "layouts.json").read_text())
FAMILIES = RECORDING["families"]


def _module(name: str) -> ModuleType:
    sys.path.insert(0, str(TESTS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(TESTS))


@pytest.mark.skipif(
    vllm.__version__ != RECORDING["vllm"], reason=f"recorded of vLLM {RECORDING['vllm']}; others allocate otherwise"
)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_host_allocates_what_was_recorded(name: str) -> None:
    recorder = _module("record_layouts")
    assert json.loads(json.dumps(recorder.record(name))) == FAMILIES[name]


def test_nothing_is_recorded_that_the_recorder_does_not_know() -> None:
    assert set(_module("record_layouts").FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_host_seam_describes_caches_as_the_recorded_tests_do(name: str) -> None:
    from vllm_adapter.host.cache_config import _cache_group, layer_caches

    recorder, recorded = _module("record_layouts"), _module("recorded")
    backend = FAMILIES[name]["backend"]
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), isa="vec")
    for tp, rank in recorder.record(name)["tp"].items():
        config, tensors = recorder.allocate(name, int(tp))
        start = min(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        seen = layer_caches(tensors, config, dict.fromkeys(tensors, layer))
        assert [dataclasses.replace(cache, address=cache.address - start) for cache in seen] == recorded.rank_caches(
            rank, 0, backend
        )
        groups = tuple(_cache_group(group.kv_cache_spec, group.layer_names) for group in config.kv_cache_groups)
        assert groups == recorded.engine_facts(name, int(tp), 0).groups
