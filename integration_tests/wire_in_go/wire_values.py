"""An engine as both sides of these tests know it: factors, metadata and envelopes; and how we ask a listener."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import envelopes
import zmq

from kv_handshake import Client, Codec, LocalOffer, Outcome
from kv_nixl_agent.memory.peers import add_checksum

__all__ = ["FACTORS", "METADATA", "asker", "envelope", "fetch"]

FACTORS: dict[str, object] = {**envelopes.FACTORS, "vllm_version": "0.33.0", "block_size": 16}
METADATA: dict[str, object] = {
    "engine_id": "p0",
    "agent_metadata": add_checksum(b"nixlSerDes|blob|"),
    "kv_caches_base_addr": [4096, 1 << 40],
    "device_id": 0,
    "num_blocks": 1000,
    "block_lens": [65536, 65536],
    "block_strides": [65536, 65536],
    "kv_cache_layout": "HND",
    "block_size": 16,
    "ssm_sizes": (0, 0),
    "attn_backend_name": "FLASH_ATTN",
    "fence": (8192, 0, 64),
    "generation": 5,
}


def envelope(dialect: int, rank: tuple[int, int]) -> bytes:
    """Return the envelope that a rank serves; its first address is 4096 plus its tensor-parallel rank."""
    metadata = {**METADATA, "kv_caches_base_addr": [4096 + rank[1], 1 << 40]}
    return Codec().encode_envelope(metadata, FACTORS, dialect=dialect, rank=rank)


@contextmanager
def asker(port: int, kind: int = zmq.DEALER) -> Iterator[zmq.Socket[bytes]]:
    """A socket at a listener; each answer must come within a minute."""
    with zmq.Context() as context, context.socket(kind) as made:
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVTIMEO, 60_000)
        made.connect(f"tcp://127.0.0.1:{port}")
        yield made


def fetch(
    port: int, ranks: Sequence[tuple[int, int]], dialect: int = 15, *, offer: LocalOffer | None = None, **more: Any
) -> Outcome:
    """Return what our client learns from a listener; it insists on equal factors unless an offer says otherwise."""
    offer = offer or LocalOffer(factors=FACTORS, policy="exact")
    with closing(Client(offer, **more)) as client:
        return client.fetch(host="127.0.0.1", port=port, ranks=ranks, engine_id="p0", dialect=dialect)
