"""The two messages of a reply, field by field: the envelope, and the agent metadata inside it.

Any reader can decode the envelope; the metadata inside is opened only after the compatibility check, so that a peer with
another schema is refused with a reason instead of a decoding error. Keys that start with ``kvh_`` are ours. vLLM's own
decoder skips keys that it does not know, so the same bytes serve both kinds of peers.

These classes are the only list of fields in the package. `Envelope` and `SentMetadata` are read as they stand, and
`AgentMetadata` adds what the envelope says. The fields of `SentMetadata` carry a `Wire` each, and `METADATA_FIELDS` collects
them: the range checks, the writer's order and defaults, the keys of every dialect and the comparison of two engines follow.
Types say the least value of every number: `Natural` from 0, `Positive` from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, final

import msgspec

from kv_handshake.wire.limits import MAX_REGIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["METADATA_FIELDS", "OURS", "AgentMetadata", "Envelope", "Refusal", "SentMetadata", "usable_capabilities"]

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
# msgspec refuses a longer list from its first bytes, before it allocates anything.
_Regions = msgspec.Meta(max_length=MAX_REGIONS)
Naturals = Annotated[tuple[Natural, ...], _Regions]
Positives = Annotated[tuple[Positive, ...], _Regions]
Integers = Annotated[tuple[int, ...], _Regions]
Texts = Annotated[tuple[str, ...], _Regions]
Members = Annotated[tuple[tuple[str, ...], ...], _Regions]
Layouts = Annotated[dict[str, tuple[Natural, Positive]], _Regions]

OURS = 0
"""Stands for "first dialect" of the keys that are ours: written in every dialect, but only if they are set."""


@final
class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A listener's coded answer to a query that it does not serve.

    Attributes:
        code: Stable name, one of `CODES` if the peer is of our version.
        message: A sentence for a person.
        retry_after_s: Earliest sensible next try, in seconds from now; 0 if the peer does not say.
    """

    code: str
    message: str = ""
    retry_after_s: float = 0.0


@final
class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outer message of a reply.

    Attributes:
        compatibility_hash: SHA-256 hex digest of the peer's hashed factors; free text in a refusal.
        agent_metadata_bytes: MessagePack map of the agent metadata, not opened yet.
        protocol: (oldest, newest) version of our extensions that the peer speaks; None from vLLM's own connector.
        rank: (pp rank, tp rank) that this reply is about.
        generation: Number of the peer's registration; differs after every new registration.
        factors: The peer's factors by name: the inputs of the hash, and more.
        checksum: CRC-32 of `agent_metadata_bytes` (polynomial 0x04C11DB7 reflected, as in zlib and Ethernet). It guards against
            accidents: every flip within 32 neighbouring bits is found. It authenticates nothing.
        capabilities: ``required``, ``supported`` or ``absent`` by capability name.
        refusal: Set if this reply is a refusal.
    """

    compatibility_hash: str
    agent_metadata_bytes: bytes
    protocol: tuple[int, int] | None = msgspec.field(default=None, name="kvh_protocol")
    rank: tuple[int, int] | None = msgspec.field(default=None, name="kvh_rank")
    generation: int | None = msgspec.field(default=None, name="kvh_generation")
    # `default={}`, not a factory: msgspec leaves out an empty map only if it knows that it is the default.
    factors: dict[str, Any] = msgspec.field(default={}, name="kvh_factors")
    checksum: int | None = msgspec.field(default=None, name="kvh_checksum")
    capabilities: dict[str, str] = msgspec.field(default={}, name="kvh_capabilities")
    refusal: Refusal | None = msgspec.field(default=None, name="kvh_refusal")


@final
@dataclass(frozen=True, slots=True)
class Wire:
    """How an attribute of the agent metadata travels.

    Attributes:
        since: First dialect with this key, or `OURS`.
        is_per_region: Whether the value is a list with one entry per region.
        is_compared: Whether a comparison of two engines reports a difference. No hash holds these values, and a
            transfer plan can bridge some of the differences.
        unset: Value to write if the engine gives none; ``...`` means the attribute's own default.
    """

    since: int = 1
    is_per_region: bool = False
    is_compared: bool = False
    unset: object = ...


class SentMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a peer rank as it travels: where its KV cache lies and how it is laid out.

    Names are those of vLLM's wire; lists are parallel, one entry per registered region. The order is that in which
    vLLM 0.32 writes the keys.

    Attributes:
        engine_id: The engine this rank belongs to.
        agent_metadata: The transfer library's own blob for this rank's agent, opaque here.
        kv_caches_base_addr: Start address of each region, bytes.
        device_id: Device ordinal of the regions.
        num_blocks: Kernel blocks per region (see `region_num_blocks` for regions that differ).
        block_lens: Bytes per block, per region.
        block_strides: Bytes from one block to the next, per region; None from peers before version 9.
        kv_cache_layout: vLLM's name of the layout, such as ``HND`` or ``LBHNC``.
        block_size: Tokens per kernel block.
        ssm_sizes: (convolution, state) bytes per block of Mamba layers; zeros without Mamba.
        attn_backend_name: Name of the attention backend.
        physical_blocks_per_logical_kv_block: Kernel blocks per scheduler block. Peers of version 2 do not send it; it
            is then reconstructed, see `reconstruct_blocks_ratio`.
        region_num_blocks: Blocks per region; None from peers before version 11, as the next three.
        region_group_ids: KV-cache group per region; negative for a region that several groups share.
        region_names: Layer name per region.
        region_mem_types: ``DRAM`` or ``VRAM`` per region.
        dcp_size: Decode context-parallel ranks.
        pcp_size: Prefill context-parallel ranks.
        ple_block_len: Bytes per page of a short-convolution state, or None.
        region_members: Names of the layers that share each region; empty unless several do.
        packed_member_layouts: (offset, bytes per page) of each layer inside a shared page, by layer name.
        fence: (address, device, word count) of the rank's fence array; None from vLLM's own connector.
        geometry: A document that says which part of the model's cache the rank holds, opaque here.
        streams: (address, device, slots, table entries per slot) of the rank's stream memory; None without streaming.
    """

    engine_id: Annotated[str, Wire()]
    agent_metadata: Annotated[bytes, Wire()]
    kv_caches_base_addr: Annotated[Naturals, Wire()]
    device_id: Annotated[Natural, Wire()]
    num_blocks: Annotated[Positive, Wire()]
    block_lens: Annotated[Positives, Wire(is_per_region=True, is_compared=True)]
    block_strides: Annotated[Positives | None, Wire(since=9, is_per_region=True)] = None
    kv_cache_layout: Annotated[str, Wire(is_compared=True)]
    block_size: Annotated[Positive, Wire(is_compared=True)]
    ssm_sizes: Annotated[tuple[Natural, Natural], Wire(is_compared=True, unset=(0, 0))]
    attn_backend_name: Annotated[str, Wire(is_compared=True, unset="")]
    physical_blocks_per_logical_kv_block: Annotated[Natural, Wire(since=3, is_compared=True, unset=1)] = 0
    region_num_blocks: Annotated[Naturals | None, Wire(since=11, is_per_region=True)] = None
    region_group_ids: Annotated[Integers | None, Wire(since=11, is_per_region=True, is_compared=True)] = None
    region_names: Annotated[Texts | None, Wire(since=11, is_per_region=True, is_compared=True)] = None
    region_mem_types: Annotated[Texts | None, Wire(since=11, is_per_region=True)] = None
    dcp_size: Annotated[Positive, Wire(since=8, is_compared=True)] = 1
    pcp_size: Annotated[Positive, Wire(since=8, is_compared=True)] = 1
    ple_block_len: Annotated[Positive | None, Wire(since=14)] = None
    region_members: Annotated[Members, Wire(since=12)] = ()
    packed_member_layouts: Annotated[Layouts, Wire(since=13)] = msgspec.field(
        default_factory=dict[str, tuple[int, int]]
    )
    fence: Annotated[tuple[Natural, Natural, Positive] | None, Wire(since=OURS)] = msgspec.field(
        default=None, name="kvh_fence"
    )
    geometry: Annotated[bytes | None, Wire(since=OURS)] = msgspec.field(default=None, name="kvh_geometry")
    streams: Annotated[tuple[Natural, Natural, Positive, Positive] | None, Wire(since=OURS)] = msgspec.field(
        default=None, name="kvh_streams"
    )


@final
class AgentMetadata(SentMetadata, frozen=True, kw_only=True):
    """Metadata of a rank, with what its envelope says: read from a peer, or made by an engine to be sent.

    Attributes:
        generation: The envelope's generation.
        factors: The envelope's factors; of a peer that sends none, those that explain another hash than this engine's.
        capabilities: Names that the envelope gives as ``required`` or ``supported``, sorted; empty from vLLM's own
            connector and from our release 0.1.
    """

    # Only vLLM has these two. A peer of its kind must send them; an engine need not give them.
    ssm_sizes: tuple[int, int] = (0, 0)
    attn_backend_name: str = ""
    generation: int | None = msgspec.field(default=None, name="kvh_generation")
    factors: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="kvh_factors")
    capabilities: tuple[str, ...] = msgspec.field(default=(), name="kvh_capabilities")


@final
@dataclass(frozen=True, slots=True)
class MetadataField:
    """A row of the field table.

    Attributes:
        name: The attribute's name.
        key: Its key on the wire.
        info: msgspec's description: type and default.
        wire: How it travels.
    """

    name: str
    key: str
    info: msgspec.structs.FieldInfo
    wire: Wire

    @property
    def unset(self) -> object:
        """Value to write if the engine gives none."""
        if self.wire.unset is not ...:
            return self.wire.unset
        return self.info.default if self.info.default is not msgspec.NODEFAULT else self.info.default_factory()


METADATA_FIELDS: tuple[MetadataField, ...] = tuple(
    MetadataField(info.name, info.encode_name, info, wire)
    for info in msgspec.structs.fields(SentMetadata)
    for wire in info.type.__metadata__
    if isinstance(wire, Wire)
)
"""The fields of `SentMetadata`, in the order of writing."""


def usable_capabilities(levels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names that are ``required`` or ``supported``, sorted; every other level counts as ``absent``."""
    return tuple(sorted(name for name, level in levels.items() if level in ("required", "supported")))
