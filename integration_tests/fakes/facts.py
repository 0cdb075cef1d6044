"""An engine's facts as the host's seam gives them, with the values of a small engine where a test does not care."""

from __future__ import annotations

from typing import Any

from vllm_adapter.cache.facts import EngineFacts


def facts(name: str, **given: Any) -> EngineFacts:
    """Return the facts of one rank of an engine; `group_ids` count the groups unless they are given."""
    alone = {"tp": 1, "tp_rank": 0, "pp": 1, "pp_rank": 0, "dcp": 1}
    place = {"host": "127.0.0.1", "port": 5600, "generation": 1}
    values = {"layout": "LBHNC", "attention_backend": "SIM", "connector_version": 14, "factors": {"model": "m"}}
    group_ids = tuple(range(len(given["groups"])))
    return EngineFacts(engine_id=name, **{**alone, **place, **values, "group_ids": group_ids, **given})
