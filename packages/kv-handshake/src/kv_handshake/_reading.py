"""Reading a reply: the envelope, the agent metadata in it, and the clock.

Every function returns a checked value or raises a `WireError` with a code. Types, keys and ranges come from the classes in
`kv_handshake._messages`.

The ranks of an engine, and the engines of a fleet, send the same factors, region names and block sizes, and differ in addresses.
So lists and factors are cut out of a message as bytes (`msgspec.Raw`) first, and a client hands in a `Repeated` that keeps the
last value of each: equal bytes are opened and checked once. For 8 ranks of 128 regions that halves the time of reading, which
is a third of a whole handshake over loopback (``tools/bench/handshake.py``). The result never depends on it.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import Raw
from msgspec.structs import asdict

from kv_handshake._decoding import DECODE_ERRORS
from kv_handshake._errors import WireError
from kv_handshake._limits import MAX_DEPTH, MAX_ENGINE_ID_CHARS, MAX_ENVELOPE_BYTES, MAX_FACTORS, MAX_REPLY_BYTES
from kv_handshake._messages import (
    METADATA_FIELDS,
    AgentMetadata,
    Envelope,
    checksum_of,
    usable_capabilities,
)
from kv_handshake._repeated import ListTable, Repeated

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from msgspec.structs import FieldInfo

__all__ = ["decode_clock", "decode_envelope", "decode_metadata", "reconstruct_blocks_ratio"]

_ADDRESS_END = 1 << 64


def _is_long(info: FieldInfo) -> bool:
    """Return whether a field is a list or a map without a fixed length."""
    text = str(info.type)
    return "..." in text or "dict[" in text


def _sent_struct(name: str, fields: Sequence[FieldInfo], closed: Collection[str]) -> Any:  # noqa: ANN401 - as msgspec declares it
    """Return a struct with these fields, of which the closed ones are kept as bytes."""
    definitions: list[Any] = []
    for info in fields:
        default: Any = None if info.required else _default(info)
        if info.name in closed and not info.required:
            default = Raw(msgspec.msgpack.encode(default))
        kind = Raw if info.name in closed else info.type
        field = (
            msgspec.field(name=info.encode_name)
            if info.required
            else msgspec.field(default=default, name=info.encode_name)
        )
        definitions.append((info.name, kind, field))
    return msgspec.defstruct(name, definitions, frozen=True, kw_only=True)


def _default(info: FieldInfo) -> object:
    return info.default if info.default is not msgspec.NODEFAULT else info.default_factory()


_METADATA_INFOS = [each.info for each in METADATA_FIELDS]
_ENVELOPE_INFOS = msgspec.structs.fields(Envelope)
_LISTS = ListTable(
    {each.name: msgspec.msgpack.Decoder(each.type).decode for each in _METADATA_INFOS if _is_long(each)},
    differing=("kv_caches_base_addr",),
)

_PER_REGION = tuple(each.name for each in METADATA_FIELDS if each.wire.is_per_region)

_envelope_decoder = msgspec.msgpack.Decoder(_sent_struct("_SentEnvelope", _ENVELOPE_INFOS, ("factors",)))
_metadata_decoder = msgspec.msgpack.Decoder(_sent_struct("_SentMetadata", _METADATA_INFOS, _LISTS.decoders))
_factors_decoder = msgspec.msgpack.Decoder(dict[str, Any])
_clock_decoder = msgspec.msgpack.Decoder(float)


def decode_envelope(frame: bytes, repeated: Repeated | None = None) -> Envelope:
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
        sent = _envelope_decoder.decode(frame)
        metadata: bytes = sent.agent_metadata_bytes
        if len(frame) - len(metadata) > MAX_ENVELOPE_BYTES:
            raise WireError(
                "malformed-envelope",
                f"envelope holds {len(frame) - len(metadata)} bytes besides its metadata; at most {MAX_ENVELOPE_BYTES} are read",
            )
        factors = (repeated or Repeated()).open("factors", sent.factors, _factors_decoder.decode, _check_factors)
    except DECODE_ERRORS as error:
        raise WireError("malformed-envelope", f"envelope of {len(frame)} bytes does not decode: {error}") from error
    if sent.checksum is not None and sent.checksum != checksum_of(metadata):
        raise WireError(
            "checksum-mismatch",
            f"the CRC-32 of {len(metadata)} metadata bytes is not the announced one; ask again",
            size_bytes=len(metadata),
        )
    values = asdict(sent)
    values["factors"] = factors
    return Envelope(**values)


def _check_factors(factors: dict[str, Any]) -> None:
    """Raise ``malformed-envelope`` unless the factors are few, and JSON."""
    if len(factors) > MAX_FACTORS:
        raise WireError("malformed-envelope", f"envelope names {len(factors)} factors; at most {MAX_FACTORS}")
    if any(_is_deep(each, MAX_DEPTH) for each in factors.values()):
        raise WireError("malformed-envelope", f"a factor nests more than {MAX_DEPTH} lists and maps")
    try:
        json.dumps(factors, sort_keys=True)
    except DECODE_ERRORS as error:
        raise WireError("malformed-envelope", f"the factors in an envelope are no JSON values: {error}") from error


def _is_deep(value: object, levels: int) -> bool:
    """Return whether lists and maps nest deeper than so many levels."""
    if isinstance(value, dict):
        inner: Iterable[object] = cast("dict[str, object]", value).values()
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return False
    return levels == 0 or any(_is_deep(each, levels - 1) for each in inner)


def decode_metadata(envelope: Envelope, repeated: Repeated | None = None) -> AgentMetadata:
    """Open an accepted envelope and return its metadata, checked.

    Raises:
        WireError: ``malformed-metadata`` or ``invalid-metadata``.
    """
    repeated = repeated or Repeated()
    try:
        sent = _metadata_decoder.decode(envelope.agent_metadata_bytes)
        values = asdict(sent)
        repeated.open_lists(values, _LISTS)
    except DECODE_ERRORS as error:
        size = len(envelope.agent_metadata_bytes)
        # msgspec reports a number out of range as "Expected `int` >= 1 - at `$.num_blocks`", a wrong type without ">=".
        code = "invalid-metadata" if "`int` >=" in str(error) else "malformed-metadata"
        raise WireError(code, f"agent metadata of {size} bytes does not decode: {error}") from error
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
    regions = len(metadata.kv_caches_base_addr)
    if regions != repeated.checked_regions:
        _check_lists(metadata, regions)
        repeated.checked_regions = regions
    if regions and max(metadata.kv_caches_base_addr) + max(metadata.block_lens) > _ADDRESS_END:
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


def _check_values(metadata: AgentMetadata) -> None:
    """Raise ``invalid-metadata`` for an engine id of a bad length, or arrays of words that are none."""
    if not 1 <= len(metadata.engine_id) <= MAX_ENGINE_ID_CHARS:
        raise _invalid("engine_id", f"has {len(metadata.engine_id)} characters, not 1 to {MAX_ENGINE_ID_CHARS}")
    if metadata.fence is not None:
        address, device, words = metadata.fence
        if address < 0 or device < 0 or words < 1 or address + 8 * words > _ADDRESS_END or address % 8:
            raise _invalid(
                "kvh_fence", f"is address {address}, device {device}, {words} words; no aligned 64-bit array"
            )
    if metadata.streams is not None:
        address, device, slots, entries = metadata.streams
        # At least a progress word and a table of each slot.
        end = address + 8 * slots * (1 + entries)
        if address < 0 or device < 0 or slots < 1 or entries < 1 or end > _ADDRESS_END or address % 8:
            raise _invalid(
                "kvh_streams",
                f"is address {address}, device {device}, {slots} slots of {entries} entries; no aligned 64-bit array",
            )


def _check_lists(metadata: AgentMetadata, regions: int) -> None:
    """Raise ``invalid-metadata`` if parallel lists differ in length, or a page begins or ends where none can."""
    for name in _PER_REGION:
        values = getattr(metadata, name)
        if values is not None and len(values) != regions:
            raise _invalid(name, f"has {len(values)} entries for {regions} regions")
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
