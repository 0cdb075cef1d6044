"""A complete engine that is not vLLM: two of them agree to move a KV cache, through the public API alone.

    python embedded_engine.py

The cache is a bytearray and the "transfer library" an in-process copy; everything that crosses between the two engines
goes through kv-handshake: metadata per rank, compatibility, and the notifications of a read.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

from kv_handshake import Client, Codec, Listener, LocalOffer

if TYPE_CHECKING:
    from collections.abc import Mapping

DIALECT = 14
BLOCK_BYTES = 64
MEMORY: dict[str, bytearray] = {}  # stands in for one-sided reads: any engine may look into any engine's cache


class Engine:
    """An engine with a single rank: a cache of blocks, a listener for its peers and a client towards them."""

    def __init__(self, name: str, *, blocks: int = 8, dtype: str = "float16") -> None:
        self.name = name
        self.cache = MEMORY[name] = bytearray(blocks * BLOCK_BYTES)
        self.factors: Mapping[str, object] = {
            "engine_name": "pure-python",
            "model": "toy",
            "dtype": dtype,
            "head_size": 4,
        }
        self.codec = Codec(capabilities={"fence": "absent"})
        self.readers_left: dict[str, int] = {}
        envelope = self.codec.encode_envelope(self._metadata(blocks), self.factors, dialect=DIALECT, rank=(0, 0))
        self.listener = Listener("127.0.0.1", 0, payloads={(0, 0): envelope})
        self.listener.start()
        self.client = Client(LocalOffer(factors=self.factors, policy="negotiated"))

    def prefill(self, request_id: str, prompt: bytes) -> list[int]:
        """Fill blocks for a prompt, keep them for one reader, and return their ids."""
        pieces = [prompt[at : at + BLOCK_BYTES] for at in range(0, len(prompt), BLOCK_BYTES)]
        for block, piece in enumerate(pieces):
            self.cache[block * BLOCK_BYTES : block * BLOCK_BYTES + len(piece)] = piece
        self.readers_left[request_id] = 1
        return list(range(len(pieces)))

    def pull(self, peer: Engine, request_id: str, blocks: list[int]) -> bytes:
        """Read a request's blocks from a peer; return the notification that is due to it."""
        outcome = self.client.fetch(
            host="127.0.0.1", port=peer.listener.port, ranks=[(0, 0)], engine_id=peer.name, dialect=DIALECT
        )
        if not outcome.is_ok:
            raise RuntimeError(f"{outcome.code}: {outcome.message}")
        theirs = outcome.peers[0, 0]
        source = MEMORY[theirs.engine_id]
        for block in blocks:
            start = theirs.kv_caches_base_addr[0] + block * theirs.block_lens[0]
            self.cache[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = source[start : start + BLOCK_BYTES]
        return self.codec.read_complete(request_id, 1)

    def notify(self, payload: bytes) -> None:
        """Take a notification; free the request's blocks when the last reader is done."""
        seen = self.codec.parse_notification(payload)
        if seen.kind == "read-complete" and seen.request_ids[0] in self.readers_left:
            self.readers_left.pop(seen.request_ids[0])

    def close(self) -> None:
        """Stop serving and asking."""
        self.client.close()
        self.listener.close()

    def _metadata(self, blocks: int) -> dict[str, object]:
        return {
            "engine_id": self.name,
            "agent_metadata": self.name.encode(),
            "kv_caches_base_addr": [0],
            "device_id": 0,
            "num_blocks": blocks,
            "block_lens": [BLOCK_BYTES],
            "kv_cache_layout": "plain",
            "block_size": 16,
            "ssm_sizes": (0, 0),
            "attn_backend_name": "none",
        }


def main() -> int:
    """Hand one prompt over, and show that an engine with another dtype is turned away by name."""
    producer, consumer, stranger = Engine("producer"), Engine("consumer"), Engine("stranger", dtype="float32")
    try:
        prompt = bytes(itertools.islice(itertools.cycle(range(256)), 200))
        blocks = producer.prefill("request-1", prompt)
        producer.notify(consumer.pull(producer, "request-1", blocks))
        print("consumer holds the producer's bytes:", consumer.cache[:200] == prompt)
        print("producer freed the request:", not producer.readers_left)
        try:
            stranger.pull(producer, "request-1", blocks)
        except RuntimeError as error:
            print("stranger was refused:", error)
    finally:
        for engine in (producer, consumer, stranger):
            engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
