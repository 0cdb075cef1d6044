"""Replies of a listener: reading the envelope, the agent metadata in it and the clock, and writing them and refusals.

Every reader returns a checked value or raises a `WireError` with a code. Types, keys and ranges come from the classes in
`kv_handshake.wire.messages`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict

from kv_handshake.errors import CODES, ConfigurationError, WireError, require
from kv_handshake.wire import limits
from kv_handshake.wire.factors import check_factors
from kv_handshake.wire.messages import (
    METADATA_FIELDS,
    OURS,
    AgentMetadata,
    Envelope,
    Refusal,
    SentMetadata,
    usable_capabilities,
)

if TYPE_CHECKING:
    from kv_handshake.wire.dialects import Dialect

__all__ = ["decode_clock", "decode_envelope", "decode_metadata", "encode_clock", "encode_metadata", "encode_refusal"]

_ADDRESS_END = 1 << 64
_BLOBS = ("agent_metadata", "geometry")
_PER_REGION = tuple(each.name for each in METADATA_FIELDS if each.wire.is_per_region)


class _Outer(msgspec.Struct):
    """The part of an envelope that shows how long the rest is."""

    agent_metadata_bytes: memoryview


# Lists are measured before any of them is opened: an empty text takes one byte here and 8 or more once it is read.
_Unopened = msgspec.defstruct(
    "_Unopened",
    [
        (each.name, msgspec.Raw, msgspec.field(name=each.key, default=msgspec.Raw(b"")))
        for each in METADATA_FIELDS
        if each.name not in _BLOBS
    ],
)

_outer_decoder = msgspec.msgpack.Decoder(_Outer)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_unopened_decoder = msgspec.msgpack.Decoder(_Unopened)
_metadata_decoder = msgspec.msgpack.Decoder(SentMetadata)
_clock_decoder = msgspec.msgpack.Decoder(float)


def decode_envelope(frame: bytes) -> Envelope:
    """Return the envelope in a reply's first frame; its metadata stays closed.

    Raises:
        WireError: ``oversized-reply``, ``malformed-envelope`` or ``checksum-mismatch``.
    """
    require((bytes, bytearray, memoryview), frame=frame)
    if len(frame) > limits.MAX_REPLY_BYTES:
        raise WireError(
            "oversized-reply",
            f"envelope of {len(frame)} bytes; at most {limits.MAX_REPLY_BYTES} are read",
            size_bytes=len(frame),
        )
    try:
        if len(frame) > limits.MAX_ENVELOPE_BYTES:
            rest_bytes = len(frame) - len(_outer_decoder.decode(frame).agent_metadata_bytes)
            if rest_bytes > limits.MAX_ENVELOPE_BYTES:
                raise WireError(
                    "malformed-envelope",
                    f"envelope holds {rest_bytes} bytes besides its metadata; at most {limits.MAX_ENVELOPE_BYTES} are read",
                )
        envelope = _envelope_decoder.decode(frame)
    except limits.DECODE_ERRORS as error:
        raise WireError("malformed-envelope", f"envelope of {len(frame)} bytes does not decode: {error}") from error
    try:
        check_factors(envelope.factors)
    except ConfigurationError as error:
        raise WireError("malformed-envelope", error.message) from error
    metadata = envelope.agent_metadata_bytes
    if envelope.checksum is not None and envelope.checksum != zlib.crc32(metadata):
        raise WireError(
            "checksum-mismatch",
            f"the CRC-32 of {len(metadata)} metadata bytes is not the announced one; ask again",
            size_bytes=len(metadata),
        )
    return envelope


def decode_metadata(envelope: Envelope) -> AgentMetadata:
    """Open an accepted envelope and return its metadata, checked.

    Raises:
        WireError: ``malformed-metadata`` or ``invalid-metadata``.
    """
    require(Envelope, envelope=envelope)
    try:
        if len(envelope.agent_metadata_bytes) > limits.MAX_LIST_BYTES:
            _check_sizes(_unopened_decoder.decode(envelope.agent_metadata_bytes))
        sent = _metadata_decoder.decode(envelope.agent_metadata_bytes)
    except limits.DECODE_ERRORS as error:
        size = len(envelope.agent_metadata_bytes)
        # msgspec reports a number out of range as "Expected `int` >= 1 - at `$.num_blocks`", a wrong type without ">=".
        code = "invalid-metadata" if "`int` >=" in str(error) else "malformed-metadata"
        raise WireError(code, f"agent metadata of {size} bytes does not decode: {error}") from error
    values = asdict(sent)
    if not sent.physical_blocks_per_logical_kv_block:
        values["physical_blocks_per_logical_kv_block"] = reconstruct_blocks_ratio(sent.ssm_sizes, sent.block_lens)
    metadata = AgentMetadata(
        **values,
        generation=envelope.generation,
        factors=envelope.factors,
        capabilities=usable_capabilities(envelope.capabilities),
    )
    _check_values(metadata)
    _check_lists(metadata)
    if metadata.kv_caches_base_addr and max(metadata.kv_caches_base_addr) + max(metadata.block_lens) > _ADDRESS_END:
        raise _invalid("kv_caches_base_addr", "reaches beyond the 64-bit address space")
    return metadata


def reconstruct_blocks_ratio(ssm_sizes: tuple[int, int], block_lens: tuple[int, ...]) -> int:
    """Return the kernel blocks per scheduler block of a peer that does not say: ceil(Mamba bytes / block bytes), or 1.

    Right for the unpadded pages of version 2; later versions send the number. For example, 36 864 + 2 097 152 Mamba
    bytes and blocks of 8192 bytes give ceil(260.5) = 261.

    Source: vLLM 0.20, hybrid models.
    """
    if sum(ssm_sizes) == 0 or not block_lens or not block_lens[0]:
        return 1
    return math.ceil(sum(ssm_sizes) / block_lens[0])


def _check_sizes(unopened: msgspec.Struct) -> None:
    """Raise ``malformed-metadata`` for a value that is too long to be opened."""
    for name, raw in asdict(unopened).items():
        if len(memoryview(raw)) > limits.MAX_LIST_BYTES:
            raise WireError(
                "malformed-metadata",
                f"{name} has {len(memoryview(raw))} bytes; at most {limits.MAX_LIST_BYTES} are read",
            )


def _check_values(metadata: AgentMetadata) -> None:
    """Raise ``invalid-metadata`` for an engine id of a bad length, or arrays of words that are none."""
    if not 1 <= len(metadata.engine_id) <= limits.MAX_ENGINE_ID_CHARS:
        raise _invalid("engine_id", f"has {len(metadata.engine_id)} characters, not 1 to {limits.MAX_ENGINE_ID_CHARS}")
    arrays: list[tuple[str, int, int]] = []
    if metadata.fence is not None:
        address, _, words = metadata.fence
        arrays.append(("kvh_fence", address, words))
    if metadata.streams is not None:
        address, _, slots, entries = metadata.streams
        arrays.append(
            ("kvh_streams", address, slots * (1 + entries))
        )  # at least a progress word and a table of each slot
    for name, address, words in arrays:
        if address % 8 or address + 8 * words > _ADDRESS_END:
            raise _invalid(name, f"is address {address} and {words} words; no aligned 64-bit array")


def _check_lists(metadata: AgentMetadata) -> None:
    """Raise ``invalid-metadata`` if parallel lists differ in length."""
    regions = len(metadata.kv_caches_base_addr)
    for name in _PER_REGION:
        values = getattr(metadata, name)
        if values is not None and len(values) != regions:
            raise _invalid(name, f"has {len(values)} entries for {regions} regions")
    if metadata.region_members and len(metadata.region_members) != regions:
        raise _invalid("region_members", f"has {len(metadata.region_members)} entries for {regions} regions")


def _invalid(field: str, problem: str) -> WireError:
    return WireError("invalid-metadata", f"{field} {problem}", field=field)


def decode_clock(frame: bytes) -> float:
    """Return the clock in a reply's second frame, seconds on the peer's own monotonic clock.

    Raises:
        WireError: ``malformed-clock`` unless the frame is one finite number.
    """
    try:
        clock_s = _clock_decoder.decode(frame)
    except limits.DECODE_ERRORS as error:
        raise WireError("malformed-clock", f"clock frame of {len(frame)} bytes does not decode: {error}") from error
    if not math.isfinite(clock_s):
        raise WireError("malformed-clock", f"clock frame says {clock_s}")
    return clock_s


_NAMES = frozenset(AgentMetadata.__struct_fields__)
_UNSET = frozenset(each.name for each in METADATA_FIELDS if each.wire.unset is not ...)

_encoder = msgspec.msgpack.Encoder()


def encode_metadata(metadata: Mapping[str, object] | AgentMetadata, dialect: Dialect) -> bytes:
    """Return the MessagePack map of one rank's agent metadata, checked as a peer would check it.

    Args:
        metadata: An `AgentMetadata`, or values by its names; keys that the dialect does not have are left out.
        dialect: Version to write.

    Raises:
        ConfigurationError: ``missing-field`` if a field without a default is absent, ``invalid-argument`` for a name
            that no dialect has or a value that cannot be written.
        WireError: ``malformed-metadata`` or ``invalid-metadata`` if a peer would refuse the result.
    """
    require((Mapping, AgentMetadata), metadata=metadata)
    if isinstance(metadata, AgentMetadata):
        # A value that is not true is the default, for which the dialect may have another one to write.
        metadata = {name: value for name, value in asdict(metadata).items() if value or name not in _UNSET}
    if not metadata.keys() <= _NAMES:
        unknown = sorted(map(str, metadata.keys() - _NAMES))
        raise ConfigurationError("invalid-argument", f"agent metadata has no field {unknown[0]!r}", field=unknown[0])
    document: dict[str, object] = {}
    for field in METADATA_FIELDS:
        if field.wire.since > dialect.version:
            continue
        if field.name not in metadata and field.info.required and field.wire.unset is ...:
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
