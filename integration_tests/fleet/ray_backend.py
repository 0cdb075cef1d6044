"""Run in the fleet's environment, without a cluster and without engines: Ray's own classes take the connector's back end.

Prints one JSON object of what they say.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, CompletionRequest
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

from vllm_adapter.host.ray_serve import register_backend

NAME = "KVTransferConnector"


def backend(**extra: object) -> Any:
    """Return the back end that Ray makes of a configuration, as on a replica whose address is set by its environment."""
    connector = {
        "kv_connector": NAME,
        "kv_connector_module_path": "vllm_adapter",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": extra,
    }
    config = LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": "tiny"},
        engine_kwargs={"kv_transfer_config": connector, "data_parallel_rank": 0},
    )
    config.setup_engine_backend()
    return config.kv_connector_backend


def shaped(backend: Any, request: Any, peer: dict[str, object] | None, response: object = None) -> dict[str, object]:
    """Return the params of both requests, and whether the prefill one is for one token."""
    prefill = backend.prepare_prefill_request(request=request, peer=peer)
    decode = backend.prepare_decode_request(request=request, peer=peer, prefill_response=response)
    return {
        "prefill": prefill.kv_transfer_params,
        "decode": decode.kv_transfer_params,
        "tokens": [prefill.max_tokens, decode.max_tokens],
        "stream": [prefill.stream, decode.stream],
        "untouched": request.kv_transfer_params is None,
    }


def flags(backend: Any) -> list[bool]:
    """Return what Ray asks after it has shaped the prefill request: whether a replica is chosen first, and both work at once."""
    return [backend.requires_peer_binding, backend.concurrent_handoff]


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def by_peer(backend: Any, request: Any, *peers: dict[str, object] | None) -> dict[str, object]:
    """Return the flags for each of these prefill replicas in turn, and what was logged meanwhile."""
    handler = Heard()
    logger = logging.getLogger("vllm.vllm_adapter")
    logger.addHandler(handler)
    found: list[list[bool]] = []
    for peer in peers:
        backend.prepare_prefill_request(request=request, peer=peer)
        found.append(flags(backend))
    logger.removeHandler(handler)
    return {"flags": found, "said": handler.lines}


def main() -> None:
    """Print what Ray's classes say."""
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"], os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = "10.0.0.1", "5600"
    os.environ["FLEET_SECRET"] = "a-fleet-secret,16+"
    register_backend()
    register_backend()
    streaming, plain = backend(streaming=True, ticket_secrets=["env:FLEET_SECRET"]), backend()
    uncovered = backend(streaming=True)
    peer = streaming.replica_metadata()
    completion = CompletionRequest(model="tiny", prompt="p", max_tokens=9, stream=True)
    chat = ChatCompletionRequest(model="tiny", messages=[{"role": "user", "content": "p"}], max_tokens=9)
    found = {
        "registered": KVConnectorBackendFactory.is_registered(NAME),
        "kind": type(streaming).__name__,
        "streaming": flags(streaming),
        "plain": flags(plain),
        "mixed": by_peer(streaming, completion, peer, {}, {}, peer),
        "uncovered": by_peer(uncovered, completion, None, None),
        "of_plain": by_peer(plain, completion, None),
        "published": [each.replica_metadata() for each in (streaming, uncovered, plain)],
        "engine_id": streaming.kv_transfer_config["engine_id"],
        "peer": peer,
        "completion": shaped(streaming, completion, peer),
        "again": shaped(streaming, completion, peer),
        "chat": shaped(streaming, chat, peer),
        "silent_peer": shaped(streaming, completion, {}),
        "sequential": shaped(plain, completion, None, type("Response", (), {"kv_transfer_params": {"a": 1}})()),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
