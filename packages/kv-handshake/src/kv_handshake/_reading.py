"""Reading a reply: the envelope, the agent metadata in it, and the clock.

Theory of operation. The ranks of one engine say mostly the same, and so do the engines of one fleet: their region names
and block sizes are equal byte for byte, and only addresses differ. So a `ReplyReader` first splits a message into its
values without opening the long ones (`msgspec.Raw`, a view of the bytes), and opens and checks a long one only if its
bytes are not those that it opened last under the same name. What it returns does not depend on that memory: equal bytes
mean an equal value, and only values that nobody can change are handed out twice.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, final

import msgspec
from msgspec import Raw

from kv_handshake._decoding import DECODE_ERRORS
from kv_handshake._errors import WireError
from kv_handshake._limits import MAX_ENGINE_ID_CHARS, MAX_FACTORS, MAX_REPLY_BYTES
from kv_handshake._messages import AgentMetadata, Envelope, Refusal, checksum_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ReplyReader", "decode_clock", "decode_envelope", "decode_metadata", "reconstruct_blocks_ratio"]

_ADDRESS_END = 1 << 64

_NIL, _EMPTY_ARRAY, _EMPTY_MAP = Raw(b"\xc0"), Raw(b"\x90"), Raw(b"\x80")


@final
class _ClosedEnvelope(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "protocol": "kvh_protocol",
        "rank": "kvh_rank",
        "generation": "kvh_generation",
        "factors": "kvh_factors",
        "checksum": "kvh_checksum",
        "capabilities": "kvh_capabilities",
        "refusal": "kvh_refusal",
    },
):
    """An `Envelope` whose factors are not opened yet."""

    compatibility_hash: str
    agent_metadata_bytes: bytes
    protocol: tuple[int, int] | None = None
    rank: tuple[int, int] | None = None
    generation: int | None = None
    factors: Raw = _EMPTY_MAP
    checksum: int | None = None
    capabilities: dict[str, str] = {}
    refusal: Refusal | None = None


@final
class _ClosedMetadata(
    msgspec.Struct, frozen=True, kw_only=True, rename={"fence": "kvh_fence", "geometry": "kvh_geometry"}
):
    """An `AgentMetadata` whose lists are not opened yet."""

    engine_id: str
    agent_metadata: bytes
    kv_caches_base_addr: Raw
    device_id: int
    num_blocks: int
    block_lens: Raw
    kv_cache_layout: str
    block_size: int
    ssm_sizes: tuple[int, int]
    attn_backend_name: str
    physical_blocks_per_logical_kv_block: int = 0
    block_strides: Raw = _NIL
    region_num_blocks: Raw = _NIL
    region_group_ids: Raw = _NIL
    region_names: Raw = _NIL
    region_mem_types: Raw = _NIL
    dcp_size: int = 1
    pcp_size: int = 1
    ple_block_len: int | None = None
    region_members: Raw = _EMPTY_ARRAY
    packed_member_layouts: Raw = _EMPTY_MAP
    fence: tuple[int, int, int] | None = None
    geometry: bytes | None = None


class _Opened(NamedTuple):
    """A value that was opened and checked: its bytes, what they say, and whether it is numbers of a usual size."""

    raw: Raw
    value: Any
    is_usual: bool = False


_envelope_decoder = msgspec.msgpack.Decoder(_ClosedEnvelope)
_metadata_decoder = msgspec.msgpack.Decoder(_ClosedMetadata)
_clock_decoder = msgspec.msgpack.Decoder(float)
_factors_decoder = msgspec.msgpack.Decoder(dict[str, Any])

_LIST_DECODERS: Mapping[str, msgspec.msgpack.Decoder[Any]] = {
    "kv_caches_base_addr": msgspec.msgpack.Decoder(tuple[int, ...]),
    "block_lens": msgspec.msgpack.Decoder(tuple[int, ...]),
    "block_strides": msgspec.msgpack.Decoder(tuple[int, ...] | None),
    "region_num_blocks": msgspec.msgpack.Decoder(tuple[int, ...] | None),
    "region_group_ids": msgspec.msgpack.Decoder(tuple[int, ...] | None),
    "region_names": msgspec.msgpack.Decoder(tuple[str, ...] | None),
    "region_mem_types": msgspec.msgpack.Decoder(tuple[str, ...] | None),
    "region_members": msgspec.msgpack.Decoder(tuple[tuple[str, ...], ...]),
    "packed_member_layouts": msgspec.msgpack.Decoder(dict[str, tuple[int, int]]),
}
_LEAST: Mapping[str, int] = {"kv_caches_base_addr": 0, "block_lens": 1, "block_strides": 1, "region_num_blocks": 0}
"""Smallest number that may stand in a list of numbers."""

_USUAL_DECODERS: Mapping[str, msgspec.msgpack.Decoder[tuple[int, ...]]] = {
    name: msgspec.msgpack.Decoder(tuple[Annotated[int, msgspec.Meta(ge=least, le=1 << 62)], ...])
    for name, least in _LEAST.items()
}
"""They check the numbers while they read them, much faster than Python can. What they refuse may still be valid."""

_REMEMBERED_BYTES = 256 * 1024
"""Longer values are opened each time, so that a peer cannot fill the memory."""

_PARALLEL = ("block_lens", "block_strides", "region_num_blocks", "region_group_ids", "region_names", "region_mem_types")
"""Lists with one entry per region."""


@final
class ReplyReader:
    """Reads replies, on one thread; what a reply repeats of the one before is opened and checked once."""

    def __init__(self) -> None:
        self._opened: dict[str, _Opened] = {}

    def envelope(self, frame: bytes) -> Envelope:
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
            closed = _envelope_decoder.decode(frame)
            factors = self._factors(closed.factors)
        except DECODE_ERRORS as error:
            raise WireError("malformed-envelope", f"envelope of {len(frame)} bytes does not decode: {error}") from error
        metadata = closed.agent_metadata_bytes
        if closed.checksum is not None and closed.checksum != checksum_of(metadata):
            raise WireError(
                "checksum-mismatch",
                f"the CRC-32 of {len(metadata)} metadata bytes is not the announced one; ask again",
                size_bytes=len(metadata),
            )
        return Envelope(
            compatibility_hash=closed.compatibility_hash,
            agent_metadata_bytes=metadata,
            protocol=closed.protocol,
            rank=closed.rank,
            generation=closed.generation,
            factors=factors,
            checksum=closed.checksum,
            capabilities=closed.capabilities,
            refusal=closed.refusal,
        )

    def metadata(self, envelope: Envelope) -> AgentMetadata:
        """Open an accepted envelope and return its metadata, checked.

        Raises:
            WireError: ``malformed-metadata`` or ``invalid-metadata``.
        """
        try:
            closed = _metadata_decoder.decode(envelope.agent_metadata_bytes)
            opened = {name: self._open(name, getattr(closed, name)) for name in _LIST_DECODERS}
        except DECODE_ERRORS as error:
            size = len(envelope.agent_metadata_bytes)
            raise WireError("malformed-metadata", f"agent metadata of {size} bytes does not decode: {error}") from error
        _check_numbers(closed)
        _check_regions(opened)
        values = {name: each.value for name, each in opened.items()}
        values["packed_member_layouts"] = dict(values["packed_member_layouts"])
        return AgentMetadata(
            engine_id=closed.engine_id,
            agent_metadata=closed.agent_metadata,
            device_id=closed.device_id,
            num_blocks=closed.num_blocks,
            kv_cache_layout=closed.kv_cache_layout,
            block_size=closed.block_size,
            ssm_sizes=closed.ssm_sizes,
            attn_backend_name=closed.attn_backend_name,
            physical_blocks_per_logical_kv_block=closed.physical_blocks_per_logical_kv_block
            or reconstruct_blocks_ratio(closed.ssm_sizes, values["block_lens"]),
            dcp_size=closed.dcp_size,
            pcp_size=closed.pcp_size,
            ple_block_len=closed.ple_block_len,
            fence=closed.fence,
            geometry=closed.geometry,
            generation=envelope.generation,
            factors=envelope.factors,
            **values,
        )

    def _factors(self, raw: Raw) -> dict[str, Any]:
        """Return the factors; they must be few, and JSON."""
        factors = _factors_decoder.decode(raw)
        known = self._opened.get("factors")
        if known is not None and known.raw == raw:
            return factors
        if len(factors) > MAX_FACTORS:
            raise WireError("malformed-envelope", f"envelope names {len(factors)} factors; at most {MAX_FACTORS}")
        try:
            json.dumps(factors, sort_keys=True)
        except DECODE_ERRORS as error:
            raise WireError("malformed-envelope", f"the factors in an envelope are no JSON values: {error}") from error
        self._remember("factors", _Opened(raw, None))
        return factors

    def _open(self, name: str, raw: Raw) -> _Opened:
        """Return one list of the agent metadata, its numbers within their bounds."""
        known = self._opened.get(name)
        if known is not None and known.raw == raw:
            return known
        opened = _open_usual(name, raw) or _open_any(name, raw)
        self._remember(name, opened)
        return opened

    def _remember(self, name: str, opened: _Opened) -> None:
        if len(memoryview(opened.raw)) <= _REMEMBERED_BYTES:
            # A view would keep the whole reply in memory.
            self._opened[name] = _Opened(opened.raw.copy(), opened.value, opened.is_usual)


def _open_usual(name: str, raw: Raw) -> _Opened | None:
    """Return a list of numbers that are no smaller than they may be and far below 2 to the 64, or None for others."""
    decoder = _USUAL_DECODERS.get(name)
    if decoder is None:
        return None
    try:
        return _Opened(raw, decoder.decode(raw), is_usual=True)
    except DECODE_ERRORS:
        return None


def _open_any(name: str, raw: Raw) -> _Opened:
    value = _LIST_DECODERS[name].decode(raw)
    if value and name in _LEAST and min(value) < _LEAST[name]:
        raise _invalid(name, f"holds {min(value)}, below {_LEAST[name]}")
    return _Opened(raw, value)


def decode_envelope(frame: bytes) -> Envelope:
    """Return the envelope in a reply's first frame; its metadata stays closed.

    Raises:
        WireError: ``oversized-reply``, ``malformed-envelope`` or ``checksum-mismatch``.
    """
    return ReplyReader().envelope(frame)


def decode_metadata(envelope: Envelope) -> AgentMetadata:
    """Open an accepted envelope and return its metadata, checked.

    Raises:
        WireError: ``malformed-metadata`` or ``invalid-metadata``.
    """
    return ReplyReader().metadata(envelope)


def reconstruct_blocks_ratio(ssm_sizes: tuple[int, int], block_lens: tuple[int, ...]) -> int:
    """Return the kernel blocks per scheduler block of a peer that does not say: ceil(Mamba bytes / block bytes), or 1.

    Right for the unpadded pages of version 2; later versions send the number.

    Source: vLLM 0.20, hybrid models.
    """
    if sum(ssm_sizes) == 0 or not block_lens:
        return 1
    return math.ceil(sum(ssm_sizes) / block_lens[0])


def _check_numbers(metadata: _ClosedMetadata) -> None:
    """Raise ``invalid-metadata`` if a value that is not a list is out of range."""
    if not 1 <= len(metadata.engine_id) <= MAX_ENGINE_ID_CHARS:
        raise _invalid("engine_id", f"has {len(metadata.engine_id)} characters, not 1 to {MAX_ENGINE_ID_CHARS}")
    for name, value, least in (
        ("num_blocks", metadata.num_blocks, 1),
        ("block_size", metadata.block_size, 1),
        ("dcp_size", metadata.dcp_size, 1),
        ("pcp_size", metadata.pcp_size, 1),
        ("ple_block_len", 1 if metadata.ple_block_len is None else metadata.ple_block_len, 1),
        ("device_id", metadata.device_id, 0),
        ("physical_blocks_per_logical_kv_block", metadata.physical_blocks_per_logical_kv_block, 0),
        ("ssm_sizes", min(metadata.ssm_sizes), 0),
    ):
        if value < least:
            raise _invalid(name, f"says {value}, below {least}")
    if metadata.fence is None:
        return
    address, device, words = metadata.fence
    if address < 0 or device < 0 or words < 1 or address + 8 * words > _ADDRESS_END or address % 8:
        raise _invalid("kvh_fence", f"is address {address}, device {device}, {words} words; no aligned 64-bit array")


def _check_regions(opened: Mapping[str, _Opened]) -> None:
    """Raise ``invalid-metadata`` if parallel lists differ in length or memory lies beyond what can be addressed."""
    addresses, block_lens = opened["kv_caches_base_addr"], opened["block_lens"]
    regions = len(addresses.value)
    for name in _PARALLEL:
        values = opened[name].value
        if values is not None and len(values) != regions:
            raise _invalid(name, f"has {len(values)} entries for {regions} regions")
    is_usual = addresses.is_usual and block_lens.is_usual
    if regions and not is_usual and max(addresses.value) + max(block_lens.value) > _ADDRESS_END:
        raise _invalid("kv_caches_base_addr", "reaches beyond the 64-bit address space")
    members = opened["region_members"].value
    if members and len(members) != regions:
        raise _invalid("region_members", f"has {len(members)} entries for {regions} regions")
    for name, (offset, length) in opened["packed_member_layouts"].value.items():
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
