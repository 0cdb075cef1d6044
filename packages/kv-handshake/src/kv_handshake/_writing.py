"""Writing what a listener sends: agent metadata, refusals and the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kv_handshake._errors import CODES, ConfigurationError
from kv_handshake._messages import Envelope, Refusal
from kv_handshake._reading import decode_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_handshake._dialect import Dialect

__all__ = ["encode_clock", "encode_metadata", "encode_refusal"]

_FIELD_DEFAULTS: Mapping[str, object] = {
    "block_strides": None,
    "physical_blocks_per_logical_kv_block": 1,
    "region_num_blocks": None,
    "region_group_ids": None,
    "region_names": None,
    "region_mem_types": None,
    "dcp_size": 1,
    "pcp_size": 1,
    "ple_block_len": None,
    "region_members": (),
    "packed_member_layouts": {},
}

_encoder = msgspec.msgpack.Encoder()


def encode_metadata(metadata: Mapping[str, object], dialect: Dialect) -> bytes:
    """Return the MessagePack map of one rank's agent metadata, checked as a peer would check it.

    Args:
        metadata: Values by the names of `AgentMetadata`; keys that the dialect does not have are left out.
        dialect: Version to write.

    Raises:
        ConfigurationError: ``missing-field`` if a field without a default is absent.
        WireError: ``malformed-metadata`` or ``invalid-metadata`` if a peer would refuse the result.
    """
    document: dict[str, object] = {}
    for name in dialect.metadata_fields:
        if name not in metadata and name not in _FIELD_DEFAULTS:
            raise ConfigurationError(
                "missing-field", f"agent metadata of version {dialect.version} needs {name!r}", field=name
            )
        document[name] = metadata[name] if name in metadata else _FIELD_DEFAULTS[name]
    if "block_strides" in document and document["block_strides"] is None:
        document["block_strides"] = document["block_lens"]  # blocks without gaps
    for name, key in (("fence", "kvh_fence"), ("geometry", "kvh_geometry")):
        if metadata.get(name) is not None:
            document[key] = metadata[name]
    try:
        encoded = _encoder.encode(document)
    except (TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise ConfigurationError("invalid-argument", f"agent metadata cannot be written: {error}") from error
    decode_metadata(Envelope(compatibility_hash="", agent_metadata_bytes=encoded))
    return encoded


def encode_refusal(code: str, message: str, *, retry_after_s: float = 0.0) -> bytes:
    """Return an envelope that says no.

    The text also stands where the hash belongs, so that vLLM's own connector, which prints a hash that it does not
    accept, shows the reason to its operator.
    """
    facts = CODES[code]
    text = f"refused ({code}): {message or facts.meaning}"
    return _encoder.encode(
        Envelope(
            compatibility_hash=text,
            agent_metadata_bytes=b"",
            refusal=Refusal(code=code, message=message or facts.meaning, retry_after_s=retry_after_s),
        )
    )


def encode_clock(clock_s: float) -> bytes:
    """Return a reply's second frame: the listener's monotonic clock in seconds, as a MessagePack float64 (9 bytes)."""
    return _encoder.encode(float(clock_s))
