"""Reading a reply: the envelope, the agent metadata in it, and the clock.

Every function returns a checked value or raises a `WireError` with a code. Types, keys and ranges of the agent metadata
come from the field table in `kv_handshake._messages`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from kv_handshake._decoding import DECODE_ERRORS
from kv_handshake._errors import WireError
from kv_handshake._limits import MAX_ENGINE_ID_CHARS, MAX_ENVELOPE_BYTES, MAX_FACTORS, MAX_REPLY_BYTES
from kv_handshake._messages import (
    METADATA_FIELDS,
    AgentMetadata,
    Envelope,
    MetadataField,
    checksum_of,
    usable_capabilities,
)

__all__ = ["decode_clock", "decode_envelope", "decode_metadata", "reconstruct_blocks_ratio"]

_ADDRESS_END = 1 << 64


def _decoder_field(field: MetadataField) -> Any:  # noqa: ANN401 - as msgspec declares it
    """Return (name, type, default) of a field as `msgspec.defstruct` takes it."""
    info = field.info
    if info.required:
        return (info.name, info.type)
    if info.default is msgspec.NODEFAULT:
        default: Any = msgspec.field(default_factory=info.default_factory, name=info.encode_name)
    else:
        default = msgspec.field(default=info.default, name=info.encode_name)
    return (info.name, info.type, default)


_Sent = msgspec.defstruct("_Sent", [_decoder_field(each) for each in METADATA_FIELDS], frozen=True, kw_only=True)
"""`AgentMetadata` without the attributes that the envelope carries: exactly the keys of the inner map."""

_NAMES = tuple(each.name for each in METADATA_FIELDS)
_PER_REGION = tuple(each.name for each in METADATA_FIELDS if each.wire.is_per_region)

_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_metadata_decoder = msgspec.msgpack.Decoder(_Sent)
_clock_decoder = msgspec.msgpack.Decoder(float)


def decode_envelope(frame: bytes) -> Envelope:
    """Return the envelope in a reply's first frame; its metadata stays closed.

    Raises:
        WireError: ``oversized-reply``, ``malformed-envelope`` or ``checksum-mismatch``.
    """
    if len(frame) > MAX_REPLY_BYTES:
        raise WireError(
            "oversized-reply",
            f"envelope of {len(frame)} bytes; at most {MAX_REPLY_BYTES} are read",
            size_bytes=len(frame),
        )
    try:
        envelope = _envelope_decoder.decode(frame)
        _check_envelope(envelope, len(frame))
    except DECODE_ERRORS as error:
        raise WireError("malformed-envelope", f"envelope of {len(frame)} bytes does not decode: {error}") from error
    metadata = envelope.agent_metadata_bytes
    if envelope.checksum is not None and envelope.checksum != checksum_of(metadata):
        raise WireError(
            "checksum-mismatch",
            f"the CRC-32 of {len(metadata)} metadata bytes is not the announced one; ask again",
            size_bytes=len(metadata),
        )
    return envelope


def _check_envelope(envelope: Envelope, frame_bytes: int) -> None:
    """Refuse factors that are too many, too long or not JSON."""
    around_bytes = frame_bytes - len(envelope.agent_metadata_bytes)
    if around_bytes > MAX_ENVELOPE_BYTES:
        raise WireError(
            "malformed-envelope",
            f"envelope holds {around_bytes} bytes besides its metadata; at most {MAX_ENVELOPE_BYTES} are read",
        )
    if len(envelope.factors) > MAX_FACTORS:
        raise WireError("malformed-envelope", f"envelope names {len(envelope.factors)} factors; at most {MAX_FACTORS}")
    try:
        json.dumps(envelope.factors, sort_keys=True)
    except DECODE_ERRORS as error:
        raise WireError("malformed-envelope", f"the factors in an envelope are no JSON values: {error}") from error


def decode_metadata(envelope: Envelope) -> AgentMetadata:
    """Open an accepted envelope and return its metadata, checked.

    Raises:
        WireError: ``malformed-metadata`` or ``invalid-metadata``.
    """
    try:
        sent = _metadata_decoder.decode(envelope.agent_metadata_bytes)
    except DECODE_ERRORS as error:
        size = len(envelope.agent_metadata_bytes)
        # msgspec reports a number out of range as "Expected `int` >= 1 - at `$.num_blocks`", a wrong type without ">=".
        code = "invalid-metadata" if "`int` >=" in str(error) else "malformed-metadata"
        raise WireError(code, f"agent metadata of {size} bytes does not decode: {error}") from error
    values = {name: getattr(sent, name) for name in _NAMES}
    values["physical_blocks_per_logical_kv_block"] = values[
        "physical_blocks_per_logical_kv_block"
    ] or reconstruct_blocks_ratio(values["ssm_sizes"], values["block_lens"])
    metadata = AgentMetadata(
        **values,
        generation=envelope.generation,
        factors=envelope.factors,
        capabilities=usable_capabilities(envelope.capabilities),
    )
    _check_values(metadata)
    _check_regions(metadata)
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


def _check_values(metadata: AgentMetadata) -> None:
    """Raise ``invalid-metadata`` for an engine id of a bad length, or a fence array that is no array of words."""
    if not 1 <= len(metadata.engine_id) <= MAX_ENGINE_ID_CHARS:
        raise _invalid("engine_id", f"has {len(metadata.engine_id)} characters, not 1 to {MAX_ENGINE_ID_CHARS}")
    if metadata.fence is not None:
        address, device, words = metadata.fence
        if address < 0 or device < 0 or words < 1 or address + 8 * words > _ADDRESS_END or address % 8:
            raise _invalid(
                "kvh_fence", f"is address {address}, device {device}, {words} words; no aligned 64-bit array"
            )


def _check_regions(metadata: AgentMetadata) -> None:
    """Raise ``invalid-metadata`` if parallel lists differ in length or memory lies beyond what can be addressed."""
    regions = len(metadata.kv_caches_base_addr)
    for name in _PER_REGION:
        values = getattr(metadata, name)
        if values is not None and len(values) != regions:
            raise _invalid(name, f"has {len(values)} entries for {regions} regions")
    if regions and max(metadata.kv_caches_base_addr) + max(metadata.block_lens) > _ADDRESS_END:
        raise _invalid("kv_caches_base_addr", "reaches beyond the 64-bit address space")
    if metadata.region_members and len(metadata.region_members) != regions:
        raise _invalid("region_members", f"has {len(metadata.region_members)} entries for {regions} regions")
    for name, (offset, length) in metadata.packed_member_layouts.items():
        if offset < 0 or length < 1:
            raise _invalid("packed_member_layouts", f"gives {name!r} offset {offset} and length {length}")


def _invalid(field: str, problem: str) -> WireError:
    return WireError("invalid-metadata", f"{field} {problem}", field=field)


def decode_clock(frame: bytes) -> float:
    """Return the clock in a reply's second frame, seconds on the peer's own monotonic clock.

    Raises:
        WireError: ``malformed-clock`` unless the frame is one finite number.
    """
    try:
        clock_s = _clock_decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise WireError("malformed-clock", f"clock frame of {len(frame)} bytes does not decode: {error}") from error
    if not math.isfinite(clock_s):
        raise WireError("malformed-clock", f"clock frame says {clock_s}")
    return clock_s
