"""The two messages of a reply: the envelope, and the agent metadata inside it.

The envelope can be read by anybody; the metadata inside is opened only after the compatibility check, so that a peer
whose schema differs is refused with a reason instead of a decoding error. Keys that start with ``kvh_`` are ours.
vLLM's own decoder skips keys that it does not know, so the same bytes serve both kinds of peers.
"""

from __future__ import annotations

import zlib
from typing import Any, final

import msgspec

__all__ = ["AgentMetadata", "Envelope", "Refusal", "checksum_of"]


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


def checksum_of(metadata_bytes: bytes) -> int:
    """Return the CRC-32 of encoded agent metadata (polynomial 0x04C11DB7 reflected, as in zlib and Ethernet).

    It is there for accidents: any flip within 32 neighbouring bits is found for certain. It authenticates nothing.
    """
    return zlib.crc32(metadata_bytes)
