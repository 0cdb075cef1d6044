"""The two messages of a reply: the envelope, and the agent metadata inside it.

The envelope can be read by anybody; the metadata inside is opened only after the compatibility check, so that a peer
whose schema differs is refused with a reason instead of a decoding error. Keys that start with ``kvh_`` are ours.
vLLM's own decoder skips keys that it does not know, so the same bytes serve both kinds of peers.
"""

from __future__ import annotations

import json
import math
import zlib
from typing import TYPE_CHECKING, Any, final

import msgspec

from kv_handshake._decoding import DECODE_ERRORS
from kv_handshake._errors import CODES, ConfigurationError, WireError
from kv_handshake._limits import MAX_ENGINE_ID_CHARS, MAX_FACTORS, MAX_REPLY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_handshake._dialect import Dialect

__all__ = [
    "AgentMetadata",
    "Envelope",
    "Refusal",
    "checksum_of",
    "decode_clock",
    "decode_envelope",
    "decode_metadata",
    "encode_clock",
    "encode_metadata",
    "encode_refusal",
    "reconstruct_blocks_ratio",
]

_ADDRESS_END = 1 << 64


@final
class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A listener's coded answer to a query that it does not serve.

    Attributes:
        code: Stable name, one of `CODES` if the peer is of our version.
        message: One sentence for a person.
        retry_after_s: Earliest sensible next try, in seconds from now; 0 if the peer does not say.
    """

    code: str
    message: str = ""
    retry_after_s: float = 0.0


@final
class Envelope(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
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
    """The outer message of a reply.

    Attributes:
        compatibility_hash: SHA-256 hex digest of the peer's hashed factors; free text in a refusal.
        agent_metadata_bytes: MessagePack map of the agent metadata, not opened yet.
        protocol: (oldest, newest) version of our extensions that the peer speaks; None from vLLM's own connector.
        rank: (pp rank, tp rank) that this reply is about.
        generation: Grows whenever the peer's registration changes.
        factors: What the peer is, by factor name: the inputs of the hash, and more.
        checksum: CRC-32 of `agent_metadata_bytes`.
        capabilities: ``required``, ``supported`` or ``absent`` by capability name.
        refusal: Set if this reply is a refusal.
    """

    compatibility_hash: str
    agent_metadata_bytes: bytes
    protocol: tuple[int, int] | None = None
    rank: tuple[int, int] | None = None
    generation: int | None = None
    factors: dict[str, Any] = {}
    checksum: int | None = None
    capabilities: dict[str, str] = {}
    refusal: Refusal | None = None


@final
class AgentMetadata(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "fence": "kvh_fence",
        "geometry": "kvh_geometry",
        "generation": "kvh_generation",
        "factors": "kvh_factors",
    },
):
    """One peer rank's metadata: where its KV cache lies and how it is laid out.

    Names are those of vLLM's wire; lists are parallel, one entry per registered region.

    Attributes:
        engine_id: The engine this rank belongs to.
        agent_metadata: The transfer library's own blob for this rank's agent, opaque here.
        kv_caches_base_addr: Start address of each region, bytes.
        device_id: Device ordinal of the regions.
        num_blocks: Kernel blocks per region (see `region_num_blocks` for regions that differ).
        block_lens: Bytes per block, per region.
        kv_cache_layout: vLLM's name of the layout, such as ``HND`` or ``LBHNC``.
        block_size: Tokens per kernel block.
        ssm_sizes: (convolution, state) bytes per block of Mamba layers; zeros without Mamba.
        attn_backend_name: Name of the attention backend.
        physical_blocks_per_logical_kv_block: Kernel blocks per scheduler block. Peers of version 2 do not send it; it
            is then reconstructed, see `reconstruct_blocks_ratio`.
        block_strides: Bytes from one block to the next, per region; None from peers before version 9.
        region_num_blocks: Blocks per region; None from peers before version 11, as the next three.
        region_group_ids: KV-cache group per region; negative for a region that several groups share.
        region_names: Layer name per region.
        region_mem_types: ``DRAM`` or ``VRAM`` per region.
        dcp_size: Decode context-parallel ranks.
        pcp_size: Prefill context-parallel ranks.
        ple_block_len: Bytes per page of a short-convolution state, or None.
        region_members: Layer names that share each region.
        packed_member_layouts: Byte offset and bytes per page of each packed member, by layer name.
        fence: (address, device, word count) of the rank's fence array; None from vLLM's own connector.
        geometry: A document that says which part of the model's cache the rank holds, opaque here.
        generation: The envelope's generation.
        factors: The envelope's factors.
    """

    engine_id: str
    agent_metadata: bytes
    kv_caches_base_addr: tuple[int, ...]
    device_id: int
    num_blocks: int
    block_lens: tuple[int, ...]
    kv_cache_layout: str
    block_size: int
    ssm_sizes: tuple[int, int]
    attn_backend_name: str
    physical_blocks_per_logical_kv_block: int = 0
    block_strides: tuple[int, ...] | None = None
    region_num_blocks: tuple[int, ...] | None = None
    region_group_ids: tuple[int, ...] | None = None
    region_names: tuple[str, ...] | None = None
    region_mem_types: tuple[str, ...] | None = None
    dcp_size: int = 1
    pcp_size: int = 1
    ple_block_len: int | None = None
    region_members: tuple[tuple[str, ...], ...] = ()
    packed_member_layouts: dict[str, tuple[int, int]] = {}
    fence: tuple[int, int, int] | None = None
    geometry: bytes | None = None
    generation: int | None = None
    factors: dict[str, Any] = {}


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

_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_metadata_decoder = msgspec.msgpack.Decoder(AgentMetadata)
_clock_decoder = msgspec.msgpack.Decoder(float)
_encoder = msgspec.msgpack.Encoder()


def checksum_of(metadata_bytes: bytes) -> int:
    """Return the CRC-32 of encoded agent metadata (polynomial 0x04C11DB7 reflected, as in zlib and Ethernet).

    It is there for accidents: any flip within 32 neighbouring bits is found for certain. It authenticates nothing.
    """
    return zlib.crc32(metadata_bytes)


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
    except DECODE_ERRORS as error:
        raise WireError("malformed-envelope", f"envelope of {len(frame)} bytes does not decode: {error}") from error
    if len(envelope.factors) > MAX_FACTORS:
        raise WireError("malformed-envelope", f"envelope names {len(envelope.factors)} factors; at most {MAX_FACTORS}")
    try:
        json.dumps(envelope.factors, sort_keys=True)
    except DECODE_ERRORS as error:
        raise WireError("malformed-envelope", f"the factors in an envelope are no JSON values: {error}") from error
    if envelope.checksum is not None and envelope.checksum != checksum_of(envelope.agent_metadata_bytes):
        raise WireError(
            "checksum-mismatch",
            f"the CRC-32 of {len(envelope.agent_metadata_bytes)} metadata bytes is not the announced one; ask again",
            size_bytes=len(envelope.agent_metadata_bytes),
        )
    return envelope


def decode_metadata(envelope: Envelope) -> AgentMetadata:
    """Open an accepted envelope and return its metadata, checked.

    Raises:
        WireError: ``malformed-metadata`` or ``invalid-metadata``.
    """
    try:
        metadata = _metadata_decoder.decode(envelope.agent_metadata_bytes)
    except DECODE_ERRORS as error:
        size = len(envelope.agent_metadata_bytes)
        raise WireError("malformed-metadata", f"agent metadata of {size} bytes does not decode: {error}") from error
    _check_metadata(metadata)
    ratio = metadata.physical_blocks_per_logical_kv_block or reconstruct_blocks_ratio(
        metadata.ssm_sizes, metadata.block_lens
    )
    return msgspec.structs.replace(
        metadata,
        physical_blocks_per_logical_kv_block=ratio,
        generation=envelope.generation,
        factors=envelope.factors,
    )


def reconstruct_blocks_ratio(ssm_sizes: tuple[int, int], block_lens: tuple[int, ...]) -> int:
    """Return the kernel blocks per scheduler block of a peer that does not say: ceil(Mamba bytes / block bytes), or 1.

    Right for the unpadded pages of version 2; later versions send the number.

    Source: vLLM 0.20, hybrid models.
    """
    if sum(ssm_sizes) == 0 or not block_lens:
        return 1
    return math.ceil(sum(ssm_sizes) / block_lens[0])


def _check_metadata(metadata: AgentMetadata) -> None:
    """Raise ``invalid-metadata`` if a number is out of range or parallel lists differ in length."""
    if not 1 <= len(metadata.engine_id) <= MAX_ENGINE_ID_CHARS:
        raise _invalid("engine_id", f"has {len(metadata.engine_id)} characters, not 1 to {MAX_ENGINE_ID_CHARS}")
    for name in ("num_blocks", "block_size", "dcp_size", "pcp_size"):
        if getattr(metadata, name) < 1:
            raise _invalid(name, f"is {getattr(metadata, name)}, below 1")
    for name in ("device_id", "physical_blocks_per_logical_kv_block"):
        if getattr(metadata, name) < 0:
            raise _invalid(name, f"is {getattr(metadata, name)}, below 0")
    if min(metadata.ssm_sizes) < 0:
        raise _invalid("ssm_sizes", f"holds {min(metadata.ssm_sizes)}, below 0")
    _check_regions(metadata)
    _check_extensions(metadata)


def _check_regions(metadata: AgentMetadata) -> None:
    regions = len(metadata.kv_caches_base_addr)
    for name in (
        "block_lens",
        "block_strides",
        "region_num_blocks",
        "region_group_ids",
        "region_names",
        "region_mem_types",
    ):
        values = getattr(metadata, name)
        if values is not None and len(values) != regions:
            raise _invalid(name, f"has {len(values)} entries for {regions} regions")
    for name, least in (("kv_caches_base_addr", 0), ("block_lens", 1), ("block_strides", 1), ("region_num_blocks", 0)):
        values = getattr(metadata, name)
        if values and min(values) < least:
            raise _invalid(name, f"holds {min(values)}, below {least}")
    if regions and max(metadata.kv_caches_base_addr) + max(metadata.block_lens) > _ADDRESS_END:
        raise _invalid("kv_caches_base_addr", "reaches beyond the 64-bit address space")
    if metadata.region_members and len(metadata.region_members) != regions:
        raise _invalid("region_members", f"has {len(metadata.region_members)} entries for {regions} regions")
    if metadata.ple_block_len is not None and metadata.ple_block_len < 1:
        raise _invalid("ple_block_len", f"is {metadata.ple_block_len}, below 1")
    for name, (offset, length) in metadata.packed_member_layouts.items():
        if offset < 0 or length < 1:
            raise _invalid("packed_member_layouts", f"gives {name!r} offset {offset} and length {length}")


def _check_extensions(metadata: AgentMetadata) -> None:
    if metadata.fence is None:
        return
    address, device, words = metadata.fence
    if address < 0 or device < 0 or words < 1 or address + 8 * words > _ADDRESS_END or address % 8:
        raise _invalid("kvh_fence", f"is address {address}, device {device}, {words} words; no aligned 64-bit array")


def _invalid(field: str, problem: str) -> WireError:
    return WireError("invalid-metadata", f"{field} {problem}", field=field)


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
