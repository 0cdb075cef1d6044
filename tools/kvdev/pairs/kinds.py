"""Kinds of pairs that are measured: a connector's configuration in both engines, and how the router asks them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final

from kvdev.demo import connector_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ALONE", "KINDS", "PairKind", "comparisons"]

ALONE: Final = "alone"
"""Name of the engine without a connector that computes the same prompts by itself."""


@dataclass(frozen=True, slots=True)
class PairKind:
    """A pair of engines as it is started.

    Attributes:
        name: Its name in figures.
        prefill: The prefill engine's `--kv-transfer-config`.
        decode: The decode engine's.
        is_concurrent: Whether the router asks both engines at once, so that the prompt is handed over while it is computed.
    """

    name: str
    prefill: Mapping[str, object]
    decode: Mapping[str, object]
    is_concurrent: bool = False


_STREAMING: Final = {"streaming": True, "remote_hosts": ["127.0.0.0/8"]}
"""Addresses of early tickets must be covered: here by the list of hosts, since these engines share no secret."""

KINDS: Final[Mapping[str, PairKind]] = {
    kind.name: kind
    for kind in (
        PairKind("ours", connector_config("kv_producer"), connector_config("kv_consumer")),
        PairKind(
            "streamed",
            connector_config("kv_producer", **_STREAMING),
            connector_config("kv_consumer", **_STREAMING),
            is_concurrent=True,
        ),
        PairKind(
            "vllm",
            {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
            {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"},
        ),
    )
}
"""Kinds by name; ours first, vLLM's own last. A kind between them is compared with both."""


def comparisons(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (kind, kind that it is compared with), for kinds in the order of `KINDS`.

    `ours, vllm` gives (ours, vllm). With a third one, `ours, streamed, vllm`, (streamed, ours) and (streamed, vllm) are added:
    vLLM's own is what all are compared with, ours is what a newer way of ours is.
    """
    return [(one, other) if other == "vllm" else (other, one) for one, other in combinations(names, 2)]
