"""Engines as `vllm-adapter check` meets them: what their ranks serve, and the result of a check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from envelopes import FACTORS as REAL_FACTORS
from envelopes import rewritten
from factories import TOKENS, attention_cache, facts

from kv_handshake import Codec
from vllm_adapter.cache.geometry import local_document, metadata_fields
from vllm_adapter.cache.vllm_peer import pack_document
from vllm_adapter.cli import main
from vllm_adapter.wiring import _CAPABILITIES

FACTORS = {**REAL_FACTORS, "nixl_connector_version": 14, "model": "tiny"}
TERMS = {"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm_adapter", "kv_role": "kv_both"}
Rank = tuple[int, int]


NO_AGENT = SimpleNamespace(agent_metadata=lambda: b"agent", fence=(0xF000, 0, 16), streams=None)


def config(**keys: object) -> str:
    return json.dumps({**TERMS, "kv_connector_extra_config": keys})


def envelopes(
    name: str,
    *,
    tp: int = 1,
    tokens: int = TOKENS,
    heads: int = 4,
    factors: dict[str, object] | None = None,
    agents: Sequence[Any] = (NO_AGENT,),
    kernel_order: str = "",
    **changes: Any,
) -> dict[Rank, bytes]:
    """Return what the ranks of an engine serve, as their connectors would make it; ranks beyond the agents have the last one."""
    made: dict[Rank, bytes] = {}
    group = facts().groups[0]
    groups = (type(group)(group.kind, tokens, 0, 0, group.layers),)
    for rank in range(tp):
        here = facts(
            engine_id=name,
            tp=tp,
            rank=rank,
            factors={**FACTORS, **(factors or {})},
            groups=groups,
            heads=heads,
            **changes,
        )
        caches = [
            replace(
                attention_cache(
                    layer, address=0x10_0000 + number * 0x1000_0000, heads=max(1, heads // tp), tokens=tokens
                ),
                kernel_order=kernel_order,
            )
            for number, layer in enumerate(group.layers)
        ]
        agent = agents[min(rank, len(agents) - 1)]
        fields = {
            **metadata_fields(here, caches),
            "agent_metadata": agent.agent_metadata(),
            "fence": agent.fence,
            "streams": agent.streams,
            "geometry": pack_document(local_document(here, caches)),
            "generation": 1,
        }
        codec = Codec(capabilities=_CAPABILITIES)
        made[0, rank] = codec.encode_envelope(
            fields, {**here.factors, **here.extra_factors}, dialect=here.connector_version, rank=(0, rank)
        )
    return made


def silenced(frames: dict[Rank, bytes]) -> dict[Rank, bytes]:
    """Return the same as vLLM's own connector sends it: a hash, and metadata without our keys."""
    return {rank: rewritten(frame, is_ours=False) for rank, frame in frames.items()}


class Checked:
    """The result of a check."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: str, configs: Sequence[str] = ()) -> None:
        capsys.readouterr()
        for option, given in zip(("--prefill-config", "--decode-config"), configs, strict=False):
            words = (*words, option, given)
        read = () if "--read" in words else ("--no-read",)  # most listeners here have no agent behind them
        self.code = main(["check", "--json", "--timeout", "2", *read, *words])
        said = capsys.readouterr()
        result = json.loads(said.out) if said.out else {"is_go": None, "findings": []}
        self.error, self.is_go, self.findings = said.err, result["is_go"], result["findings"]

    def reasons(self) -> list[tuple[str, str]]:
        return [(each["topic"], each["code"]) for each in self.findings if each["level"] == "no-go"]

    def codes(self, level: str) -> set[str]:
        return {each["code"] for each in self.findings if each["level"] == level}

    def message(self, code: str) -> str:
        (found,) = [f"{each['message']} -> {each['advice']}" for each in self.findings if each["code"] == code]
        return found
