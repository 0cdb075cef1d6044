"""Writing the messages of a listener: agent metadata, refusals and the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kv_handshake._errors import CODES, ConfigurationError
from kv_handshake._messages import METADATA_FIELDS, OURS, AgentMetadata, Envelope, Refusal
from kv_handshake._reading import decode_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_handshake._dialect import Dialect

__all__ = ["encode_clock", "encode_metadata", "encode_refusal"]

_NAMES = frozenset(AgentMetadata.__struct_fields__)

_encoder = msgspec.msgpack.Encoder()


def encode_metadata(metadata: Mapping[str, object], dialect: Dialect) -> bytes:
    """Return the MessagePack map of one rank's agent metadata, checked as a peer would check it.

    Args:
        metadata: Values by the names of `AgentMetadata`; keys that the dialect does not have are left out.
        dialect: Version to write.

    Raises:
        ConfigurationError: ``missing-field`` if a field without a default is absent, ``invalid-argument`` for a name
            that no dialect has or a value that cannot be written.
        WireError: ``malformed-metadata`` or ``invalid-metadata`` if a peer would refuse the result.
    """
    if not metadata.keys() <= _NAMES:
        unknown = sorted(metadata.keys() - _NAMES)
        raise ConfigurationError("invalid-argument", f"agent metadata has no field {unknown[0]!r}", field=unknown[0])
    document: dict[str, object] = {}
    for field in METADATA_FIELDS:
        if field.wire.since > dialect.version:
            continue
        if field.name not in metadata and field.info.required:
            raise ConfigurationError(
                "missing-field", f"agent metadata of version {dialect.version} needs {field.name!r}", field=field.name
            )
        value = metadata.get(field.name, ...)
        if value is ...:
            value = field.unset
        if field.wire.since != OURS or value is not None:
            document[field.key] = value
    if "block_strides" in document and document["block_strides"] is None:
        document["block_strides"] = document["block_lens"]  # blocks without gaps
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
