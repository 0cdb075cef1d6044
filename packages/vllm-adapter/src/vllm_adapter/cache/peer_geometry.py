"""A peer rank's geometry document: sent by our own peers, derived from the numbers that vLLM's own connector sends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast, final

from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.ports import DeriveDocument, MemoryKind, PeerMetadata, PeerSizes

__all__ = ["PeerGeometry", "pack_document"]

_MAX_DOCUMENT_BYTES = 16 * 2**20


def pack_document(document: Mapping[str, object]) -> bytes:
    """Return a geometry document as it travels (UTF-8 JSON)."""
    return json.dumps(document, separators=(",", ":")).encode()


@final
class PeerGeometry:
    """Finds the geometry document of a peer rank.

    Args:
        derive: Makes a document from our own one and a peer's plain numbers, for peers that send no document.
    """

    def __init__(self, derive: DeriveDocument) -> None:
        self._derive = derive

    def document(
        self, local: Mapping[str, object], metadata: PeerMetadata, rank: tuple[int, int], sizes: PeerSizes
    ) -> Mapping[str, object]:
        """Return the document of a (pp, tp) rank; raises coded errors on what does not fit."""
        if metadata.geometry is not None:
            return _unpack(metadata.geometry)
        facts: dict[str, object] = {
            "kv_caches_base_addr": list(metadata.kv_caches_base_addr),
            "device_id": metadata.device_id,
            "num_blocks": metadata.num_blocks,
            "block_lens": list(metadata.block_lens),
            "block_strides": list(metadata.block_strides) if metadata.block_strides is not None else None,
            "block_size": metadata.block_size,
            "physical_blocks_per_logical_kv_block": metadata.physical_blocks_per_logical_kv_block,
            "kv_cache_layout": metadata.kv_cache_layout,
            "ssm_sizes": list(metadata.ssm_sizes),
            "region_names": list(metadata.region_names) if metadata.region_names is not None else None,
            "region_num_blocks": list(metadata.region_num_blocks) if metadata.region_num_blocks is not None else None,
            "region_group_ids": list(metadata.region_group_ids) if metadata.region_group_ids is not None else None,
            "region_mem_types": list(metadata.region_mem_types) if metadata.region_mem_types is not None else None,
        }
        return self._derive(
            local,
            facts,
            peer_tp=sizes.peer_tp,
            peer_tp_rank=rank[1],
            peer_pp=sizes.peer_pp,
            peer_pp_rank=rank[0],
            peer_dcp=sizes.peer_dcp,
        )

    @staticmethod
    def memory_kind(metadata: PeerMetadata) -> MemoryKind:
        """Return where the peer's pages live; DRAM where it does not say."""
        kinds = set(metadata.region_mem_types or ("DRAM",))
        if len(kinds) != 1 or not kinds <= {"DRAM", "VRAM"}:
            raise AdapterError(
                f"the peer's regions are of the memory kinds {sorted(kinds)}; one of DRAM and VRAM is supported",
                code="mixed-memory-kinds",
                fault="peer",
                context={"kinds": sorted(kinds)},
            )
        return cast("MemoryKind", kinds.pop())


def _unpack(raw: bytes) -> Mapping[str, object]:
    try:
        document: object = json.loads(raw) if len(raw) <= _MAX_DOCUMENT_BYTES else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise AdapterError(
            f"the peer's geometry document ({len(raw)} bytes) is not a JSON object",
            code="bad-geometry-document",
            fault="peer",
            context={"length_bytes": len(raw)},
        )
    return cast("dict[str, object]", document)
