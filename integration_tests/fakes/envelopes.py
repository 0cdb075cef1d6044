"""Envelopes of a side channel, rewritten for tests, and the factors of a real model."""

from __future__ import annotations

import msgspec

from kv_handshake.testing import load_vectors

_VECTOR = next(each for each in load_vectors() if each.name == "envelope-extended-v15")
FACTORS: dict[str, object] = dict(_VECTOR.expect["metadata"]["factors"])


def rewritten(envelope: bytes, *, is_ours: bool = True, **changes: object) -> bytes:
    """Return an envelope with other keys, around the metadata or in them; without `is_ours` as vLLM's own connector sends it."""
    around = msgspec.msgpack.decode(envelope)
    inside = msgspec.msgpack.decode(around["agent_metadata_bytes"])
    around.pop("kvh_checksum", None)
    if not is_ours:
        around, inside = ({key: each[key] for key in each if "kvh_" not in key} for each in (around, inside))
    for key, value in changes.items():
        (around if key.startswith("kvh_") or key == "compatibility_hash" else inside)[key] = value
    return msgspec.msgpack.encode({**around, "agent_metadata_bytes": msgspec.msgpack.encode(inside)})
