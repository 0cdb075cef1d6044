"""A peer rank's geometry document: sent by our own peers, or derived from the numbers that vLLM's own connector sends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast, final

from vllm_adapter.cache.vllm_peer import derive_document
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm_adapter.cache.documents import GeometryDocument, GroupDocument, PeerSizes
    from vllm_adapter.cache.vllm_peer import PeerShape
    from vllm_adapter.ports import AgentMetadata, MemoryKind

__all__ = ["PeerGeometry", "pack_document"]

_MAX_DOCUMENT_BYTES = 16 * 2**20
_MAX_DOCUMENT_VALUES = 1 << 19
"""Most commas and brackets of a document, counted before it is read: a value of two bytes takes sixty in memory."""
_SENT = (
    "kv_caches_base_addr",
    "device_id",
    "num_blocks",
    "block_lens",
    "block_strides",
    "block_size",
    "physical_blocks_per_logical_kv_block",
    "kv_cache_layout",
    "ssm_sizes",
    "region_names",
    "region_num_blocks",
    "region_mem_types",
)
"""Fields of the metadata of vLLM's own connector from which a document is derived."""


def pack_document(document: Mapping[str, object]) -> bytes:
    """Return a geometry document as it travels (UTF-8 JSON)."""
    return json.dumps(document, separators=(",", ":")).encode()


@final
class PeerGeometry:
    """Provides the geometry document of a peer rank.

    Args:
        reshard: Makes the document of another rank from our own one, for peers that send no document.
        dealt_groups: Whether context parallelism deals out the tokens of each group.
    """

    def __init__(
        self, reshard: Callable[[Mapping[str, object], PeerShape], Mapping[str, object]], dealt_groups: Sequence[bool]
    ) -> None:
        self._reshard = reshard
        self._dealt_groups = tuple(dealt_groups)

    def document(
        self, local: GeometryDocument, metadata: AgentMetadata, rank: tuple[int, int], sizes: PeerSizes
    ) -> Mapping[str, object]:
        """Return the document of a (pp, tp) rank; raises coded errors for metadata that does not fit."""
        if metadata.geometry is not None:
            return _unpack(metadata.geometry)
        facts: dict[str, object] = {name: getattr(metadata, name) for name in _SENT}
        return derive_document(local, facts, rank, sizes, reshard=self._reshard, dealt_groups=self._dealt_groups)

    def check_context(self, groups: Iterable[GroupDocument], sizes: PeerSizes) -> None:
        """Raise a coded error if an engine's groups deal out their tokens to other sizes than its ticket says.

        A client may change an unsealed ticket, and an engine must not be set up twice with two sizes.
        """
        context = max((group.get("context", (1, 0, 1))[0] for group in groups), default=1)
        if any(self._dealt_groups) and context != sizes.dcp:
            raise AdapterError(
                f"a ticket says that the peer has {sizes.dcp} context ranks, but its pages are those of {context}",
                code="context-size-differs",
                fault="peer",
                context={"dcp": sizes.dcp, "found": context},
            )

    @staticmethod
    def value_count(metadata: AgentMetadata) -> int:
        """Return the approximate number of values in a peer rank's document; 0 if it sends none."""
        return _count_values(metadata.geometry) if metadata.geometry is not None else 0

    @staticmethod
    def memory_kind(metadata: AgentMetadata) -> MemoryKind:
        """Return the memory kind of the peer's pages; DRAM if it announces none."""
        kinds = set(metadata.region_mem_types or ("DRAM",))
        if len(kinds) != 1 or not kinds <= {"DRAM", "VRAM"}:
            raise AdapterError(
                f"the peer's regions are of the memory kinds {sorted(kinds)[:4]}; one of DRAM and VRAM is supported",
                code="mixed-memory-kinds",
                fault="peer",
                context={"kinds": sorted(kinds)[:4]},
            )
        return cast("MemoryKind", kinds.pop())


def _unpack(raw: bytes) -> Mapping[str, object]:
    is_short = len(raw) <= _MAX_DOCUMENT_BYTES and _count_values(raw) <= _MAX_DOCUMENT_VALUES
    try:
        document: object = json.loads(raw) if is_short else None
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


def _count_values(raw: bytes) -> int:
    return sum(raw.count(mark) for mark in (b",", b"[", b"{"))
