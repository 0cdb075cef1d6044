"""Releases that engines of a fleet run, and which of them may read from each other.

A release differs in what production sends and compares: the connector version (the dialect of messages and tickets), vLLM's
version among the compatibility factors, and, for the first release of this project, the fields that it did not have yet.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final
from unittest.mock import patch

import vllm_adapter.wiring

__all__ = ["CHANGES", "RELEASES", "Release", "may_read"]

_NEW_FIELDS = ("kv_nonce", "kv_prompt", "kv_first_tokens", "kv_span_tokens")


@final
@dataclass(frozen=True, slots=True)
class Release:
    """Release of the connector, as an engine runs it.

    Attributes:
        vllm: Version of vLLM; empty for an engine whose factors name none.
        connector: Connector version.
        has_capabilities: Whether it announces nonces and bound tickets; the first release did not.
        missing: Fields that its tickets do not have.
    """

    vllm: str = ""
    connector: int = 14
    has_capabilities: bool = True
    missing: tuple[str, ...] = ()

    def factors(self) -> dict[str, object]:
        """Return the inputs of vLLM's compatibility hash."""
        if not self.vllm:
            return {"model": "m", "dtype": "f"}
        return {
            "vllm_version": self.vllm,
            "nixl_connector_version": self.connector,
            "model": "m",
            "dtype": "f",
            "num_kv_heads": 4,
            "head_size": 2,
            "num_hidden_layers": 2,
            "attn_backend_name": "SIM",
            "cache_dtype": "auto",
            "is_hma_enabled": True,
            "speculative_config": None,
            "transfer_mode": "pull",
        }

    def running(self) -> AbstractContextManager[object]:
        """Return a context in which production announces what this release has."""
        return nullcontext() if self.has_capabilities else patch.object(vllm_adapter.wiring, "_CAPABILITIES", {})


RELEASES = {
    "": Release(),
    "0.32.0": Release("0.32.0"),
    "0.32.1": Release("0.32.1"),
    "0.33.0": Release("0.33.0", 15),
    "first": Release("0.32.0", 14, has_capabilities=False, missing=_NEW_FIELDS),
}
CHANGES = (("0.32.0", "0.32.1"), ("0.32.0", "0.33.0"), ("0.33.0", "0.32.0"), ("first", "0.32.0"))
"""Upgrades and downgrades: (from, to)."""


def may_read(one: str, other: str, compatibility: str) -> bool:
    """Return whether engines of two releases may read from each other.

    vLLM's rule ("exact") is that the hashes are equal, so the same vLLM to the last digit; factor by factor ("negotiated") the
    same minor version will do. The fields that our first release lacks enter neither.
    """
    here, there = RELEASES[one], RELEASES[other]
    if here.vllm == there.vllm and here.connector == there.connector:
        return True
    minors = [release.vllm.split(".")[:2] for release in (here, there)]
    return compatibility == "negotiated" and here.connector == there.connector and minors[0] == minors[1]
