"""Run inside the host's environment: vLLM has what our stubs say, and both connectors agree on hashes and wire."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

import msgspec
import pytest
from facts import facts

from vllm_adapter.host.vllm import check_host

ROOT = Path(__file__).resolve().parents[3]
SINCE = {"vllm.v1.metrics.cache_hit_source": (0, 32)}
"""Modules that older supported versions lack; the host seam does without them."""
STUBS = sorted((ROOT / "typings" / "vllm").rglob("*.pyi"))


def _names(stub: Path) -> list[tuple[str, str | None, str]]:
    module = ".".join(stub.relative_to(ROOT / "typings").with_suffix("").parts).removesuffix(".__init__")
    found: list[tuple[str, str | None, str]] = []
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.append((module, None, node.name))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found.append((module, None, node.name))
            found += [(module, node.name, item.name) for item in node.body if isinstance(item, ast.FunctionDef)]
    return found


@pytest.mark.parametrize(("module", "owner", "name"), [entry for stub in STUBS for entry in _names(stub)])
def test_the_host_has_what_the_stubs_say(module: str, owner: str | None, name: str) -> None:
    if check_host() < SINCE.get(module, (0, 0)):
        pytest.skip(f"{module} came with vLLM {'.'.join(map(str, SINCE[module]))}")
    where = importlib.import_module(module)
    assert hasattr(getattr(where, owner) if owner else where, name), f"{module}.{owner or ''}.{name}"


def test_the_hosts_own_decoder_reads_our_envelope() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload

    from kv_handshake import Codec
    from vllm_adapter.cache.facts import CacheGroup, LayerCache
    from vllm_adapter.cache.geometry import metadata_fields

    cache = LayerCache("layers.0", 0, 4096, (8, 2, 16, 8), (1024, 512, 32, 4), 4, "DRAM", 0, 1024)
    groups = (CacheGroup("attention", 16, 0, 0, ("layers.0",)),)
    engine = facts("e", total_kv_heads=2, head_size=4, block_count=8, generation=7, groups=groups)
    of_thread = {"agent_metadata": b"a", "fence": (4096, 0, 2), "streams": None, "geometry": b"{}", "generation": 7}
    frame = Codec().encode_envelope({**metadata_fields(engine, [cache]), **of_thread}, engine.factors, dialect=14)
    payload = msgspec.msgpack.decode(frame, type=NixlHandshakePayload)
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
    assert (metadata.engine_id, metadata.block_lens, metadata.num_blocks) == ("e", [1024], 8)
    assert metadata.region_names == ["layers.0"]


def test_the_plugin_registers_the_connector_once() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import AsyncEngineArgs

    from vllm_adapter.plugin import CONNECTOR_NAME, register

    register()
    once = AsyncEngineArgs.create_engine_config
    register()
    found = KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME)
    assert found.__name__ == CONNECTOR_NAME
    # By this method vLLM makes the configuration of each engine, which the plugin checks before the weights load.
    assert AsyncEngineArgs.create_engine_config is once
    assert "early_checks" in once.__code__.co_filename


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector", "KVTransferConnector"])
def test_the_hosts_factory_finds_us_under_each_name(name: str) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import vllm_adapter

    config = KVTransferConfig(kv_connector=name, kv_connector_module_path="vllm_adapter", kv_role="kv_consumer")
    assert KVConnectorFactory.get_connector_class(config) is vllm_adapter.KVTransferConnector


def test_the_drop_in_class_carries_the_hosts_contract() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    import vllm_adapter

    connector = vllm_adapter.NixlConnector
    assert issubclass(connector, KVConnectorBase_V1)
    assert issubclass(connector, SupportsHMA)
    assert not connector.__abstractmethods__
    json.dumps(connector.build_kv_connector_stats().to_dict())
