"""The recorded cache layouts are what this vLLM allocates, and the host seam reads them as the recorded tests do."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import vllm
from full_engine import TESTS, Layer, adapters_tests
from oracle.memory import slot_mapping
from packaging.version import Version

from vllm_adapter.host.vllm import engine_facts

RECORDING = json.loads((TESTS / "data" / "layouts.json").read_text())
FAMILIES = RECORDING["families"]
_AS_RECORDED = pytest.mark.skipif(
    Version(vllm.__version__) < Version(RECORDING["vllm"]), reason=f"before {RECORDING['vllm']} they lie otherwise"
)


@_AS_RECORDED
@pytest.mark.parametrize("name", FAMILIES)
def test_the_host_allocates_what_was_recorded(name: str) -> None:
    recorder = adapters_tests("record_layouts")
    assert json.loads(json.dumps(recorder.record(name))) == FAMILIES[name]


def test_nothing_is_recorded_that_the_recorder_does_not_know() -> None:
    assert set(adapters_tests("record_layouts").FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_host_seam_describes_caches_as_the_recorded_tests_do(name: str) -> None:
    from vllm_adapter.host.cache_config import _cache_group, layer_caches

    recorder, recorded = adapters_tests("record_layouts"), adapters_tests("recorded")
    backend = FAMILIES[name]["backend"]
    layer = Layer(SimpleNamespace(get_name=lambda: backend), "vec")
    for tp, rank in recorder.record(name)["tp"].items():
        config, tensors = recorder.allocate(name, int(tp))
        start = min(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        seen = layer_caches(tensors, config, dict.fromkeys(tensors, layer))
        types = {name: (str(tensor.dtype),) if tensor.itemsize > 1 else () for name, tensor in tensors.items()}
        # A state's are those of its parts, whatever the type of the tensor that holds them.
        assert all(cache.element_types == types[cache.layer] for cache in seen if not cache.state_kind)
        seen = [dataclasses.replace(cache, address=cache.address - start, element_types=()) for cache in seen]
        assert seen == recorded.rank_caches(rank, 0, backend)
        groups = tuple(_cache_group(group.kv_cache_spec, group.layer_names) for group in config.kv_cache_groups)
        assert groups == recorded.engine_facts(name, int(tp), 0).groups


@_AS_RECORDED
@pytest.mark.parametrize(("dcp", "size"), [(1, 4), (2, 4), (2, 6), (4, 6)])
def test_the_byte_oracle_deals_tokens_out_as_the_hosts_kernel_does(
    dcp: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on GPUs alone, so here in Triton's interpreter."""
    language = pytest.importorskip("triton.language")
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.v1.worker import block_table

    monkeypatch.setattr(block_table, "tl", language)
    kernel = InterpretedFunction(block_table.ComputeSlotMappingKernel.kernel)
    blocks, tokens, found = [5, 9, 2], np.arange(2 * size * dcp + 3), torch.zeros(2 * size * dcp + 3, dtype=torch.int64)
    for rank, turn in itertools.product(range(dcp), [n for n in range(1, size + 1) if size % n == 0]):
        kernel[2,](
            len(tokens), len(tokens), torch.tensor([0, len(tokens)], dtype=torch.int32), torch.from_numpy(tokens),
            torch.tensor([blocks], dtype=torch.int32), len(blocks), found, KV_CACHE_BLOCK_SIZE=size,
            TOTAL_CP_WORLD_SIZE=dcp, TOTAL_CP_RANK=rank, CP_KV_CACHE_INTERLEAVE_SIZE=turn, PAD_ID=-1, BLOCK_SIZE=1024,
        )  # fmt: skip
        assert found.tolist() == slot_mapping(tokens, blocks, size, (dcp, rank, turn)).tolist(), (rank, turn)


@_AS_RECORDED
@pytest.mark.parametrize("name", ["NixlConnector", "KVTransferConnector"])
@pytest.mark.parametrize("given", [None, 4])
def test_both_halves_know_the_turns_that_workers_take(make_engine: Any, name: str, given: int | None) -> None:
    """The host makes them a block for its own connector's name, after the scheduler's half was made (0.32)."""
    engine = make_engine("P")
    config, cache = engine.config, engine.scheduler.kv_cache_config
    config.kv_transfer_config.kv_connector = name
    parallel = config.parallel_config
    parallel.decode_context_parallel_size = 2
    if given is not None:
        parallel.cp_kv_cache_interleave_size, parallel._allow_auto_resolve_cp_interleave_size = given, False
    if Version(vllm.__version__) >= Version("0.33.dev0"):
        config.adjust_dcp_kv_cache_interleave_size(cache.kv_cache_groups)
    before = engine_facts(config, cache, is_worker=False)
    if Version(vllm.__version__) < Version("0.33.dev0"):
        config.adjust_dcp_kv_cache_interleave_size(cache)
    after = engine_facts(config, cache, is_worker=False)
    is_pinned = given is None and name == "NixlConnector"
    assert after.interleave_tokens == (after.groups[0].block_tokens if is_pinned else given or 1)
    assert (before.interleave_tokens, before.splits_blocks) == (after.interleave_tokens, not is_pinned)


class HostsWorker:
    """Attributes of vLLM's own worker from which `register_kv_caches` makes its handshake metadata."""

    def __init__(self, config: Any, metadata: Any) -> None:
        from vllm.v1.kv_cache_interface import (
            CircularBufferSpec,
            FullAttentionSpec,
            MambaSpec,
            MLAAttentionSpec,
            UniformTypeKVCacheSpecs,
        )

        self._layer_specs: dict[str, Any] = {}
        for group in config.transfer_groups:
            spec = group.kv_cache_spec
            each = (
                spec.kv_cache_specs
                if isinstance(spec, UniformTypeKVCacheSpecs)
                else dict.fromkeys(group.layer_names, spec)
            )
            self._layer_specs.update(each)
        specs = list(self._layer_specs.values())
        self._has_mamba = any(isinstance(spec, MambaSpec) for spec in specs)
        self.use_mla = any(isinstance(spec, MLAAttentionSpec) for spec in specs)
        self._is_csa_linear = any(isinstance(spec, CircularBufferSpec) for spec in specs)
        self._is_hma_required = any(not isinstance(spec, FullAttentionSpec) for spec in specs)
        self._has_packed_cache = self._supports_pp_hma = self.use_host_buffer = False
        kernel_blocks = self._physical_blocks_per_logical_kv_block = metadata["physical_blocks_per_logical_kv_block"]
        self._logical_num_blocks, self.num_blocks = config.num_blocks, config.num_blocks * kernel_blocks
        self.block_size, self._mamba_ssm_size = metadata["block_size"], metadata["ssm_sizes"]
        self.kv_cache_layout = metadata["kv_cache_layout"]
        self.kv_cache_config, self.vllm_config = config, None
        self.model_config = SimpleNamespace(get_total_num_kv_heads=lambda: 8)
        self.engine_id, self.backend_name, self.attn_backends = "e", "", []
        self.kv_buffer_device, self.nixl_memory_type, self.nixl_backends = "cpu", "DRAM", ["UCX"]
        self._head_sharded_draft_kv_heads = None  # 0.33: names no region
        self.tp_rank = self.transfer_tp_rank = self.device_id = 0
        self.transfer_tp_size = self.world_size = self.pp_size = self.dcp_size = self.pcp_size = 1
        self.host_xfer_buffers: dict[str, Any] = {}
        for name in ("block_len_per_layer", "block_stride_per_layer", "_region_is_mla", "_registered_descs"):
            setattr(self, name, [])
        for name in ("group_ids", "names", "num_blocks", "members"):
            setattr(self, f"region_{name}", [])
        for name in (
            "num_blocks",
            "region_num_blocks",
            "region_group_ids",
            "uses_region_group_mapping",
            "region_mem_types",
        ):
            setattr(self, f"dst_{name}", {})
        self.kv_caches_base_addr: Any = defaultdict(dict)
        self.src_xfer_handles_by_block_size: dict[int, int] = {}
        self._transfer_layer_names = self._transfer_layer_region_indices = ()
        self.nixl_wrapper = SimpleNamespace(
            get_reg_descs=lambda *_: None, register_memory=lambda *_, **__: None, get_agent_metadata=lambda: b""
        )
        self._leaves_dram_xfer_to_rank0 = lambda: False
        self.register_local_xfer_handler = lambda _: (0, [])
        self.shutdown = lambda: None


HOST_CANNOT = {
    "replicated-convolution": "its own worker asserts that such a state is part of another kind of cache",
    "flash-attn-heads-outermost": "neither connector asks for its layout",
    "rocm-planes-outermost": "neither connector asks for its layout",
}


@pytest.mark.proves(
    "sparse latent, DeepSeek V4, chunks, other states, fp8, int8, drafter: to vLLM's own",
)
@pytest.mark.never_wrong("B16")
@_AS_RECORDED
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - HOST_CANNOT))
def test_an_envelope_names_the_regions_that_the_hosts_own_worker_registers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader asserts equal counts and lengths, and ends its engine where the groups of the regions differ."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    from vllm_adapter.cache.geometry import metadata_fields
    from vllm_adapter.host.cache_config import layer_caches

    config, tensors = adapters_tests("record_layouts").allocate(name, 1)
    backend = FAMILIES[name]["backend"]
    layers = dict.fromkeys(tensors, Layer(SimpleNamespace(get_name=lambda: backend), "vec"))
    facts, caches = adapters_tests("recorded").engine_facts(name, 1, 0), layer_caches(tensors, config, layers)
    ours = metadata_fields(facts, caches)
    monkeypatch.setattr(base_worker, "compute_nixl_compatibility_hash", lambda *_, **__: "")
    worker: Any = object.__new__(NixlPullConnectorWorker)
    vars(worker).update(vars(HostsWorker(config, ours)))
    worker.register_kv_caches(tensors)
    hosts = msgspec.msgpack.decode(worker.xfer_handshake_metadata.agent_metadata_bytes, type=NixlAgentMetadata)
    named = ("kv_caches_base_addr", "block_lens", "block_strides", "num_blocks", "ple_block_len")
    of_regions = ("region_num_blocks", "region_group_ids", "region_names", "region_mem_types")
    assert {each: ours[each] for each in (*named, *of_regions)} == {
        each: getattr(hosts, each) for each in (*named, *of_regions)
    }
