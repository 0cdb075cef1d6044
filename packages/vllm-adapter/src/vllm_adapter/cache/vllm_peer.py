"""A peer rank's geometry document: sent by our own peers, or derived from what vLLM's own connector sends.

Theory of operation. vLLM's own connector sends numbers only, so its geometry is derived from our document. The peer runs the
same model, so its layers have our fields; its shard, block size, order of heads and tokens, and addresses may differ. The
planner reshards our document to the peer's rank; this module places the result at the addresses that the peer sent, and checks
every length that it sent against the one that follows from the model. Regions are named by layer; without names they are in the
natural order of layer names, as that connector registers them. Layers that share a region here share one at the peer.

Worked example. Our tp 1 keeps layers.0 in pages of 16 tokens x 8 heads x 256 bytes = 32 768 bytes. A peer of tp 2 with blocks
of 32 tokens must have 32 x 4 x 256 = 32 768 bytes too; one that says 65 536 runs another model or another tensor-parallel size,
and is refused (`page-bytes-differ`). State pages take several kernel blocks: with 10 per block and `block_lens` 4 096 the
state's page is 40 960 bytes.

Source: the metadata of vLLM's own connector, versions 3 to 15 (block lengths and strides in bytes, block size in kernel tokens,
one region per layer from vLLM 0.27 on).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast, final

from vllm_adapter.cache.documents import RegionDocument, natural
from vllm_adapter.cache.fields import extent_bytes, held_bytes
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm_adapter.cache.documents import GeometryDocument, GroupDocument, HeadOrder, PeerSizes
    from vllm_adapter.ports import AgentMetadata, MemoryKind

__all__ = ["PeerGeometry", "pack_document"]

_ORDERS: dict[str, HeadOrder] = {
    "HND": "HN",
    "LBHNC": "HN",
    "BLHNC": "HN",
    "NHD": "NH",
    "LBNHC": "NH",
    "BLNHC": "NH",
}


def _refusal(code: str, message: str, **context: object) -> AdapterError:
    return AdapterError(message, code=code, fault="peer", context=context)


def _check_stages_can_be_told(local: GeometryDocument, metadata: AgentMetadata) -> None:
    """Refuse a pipeline whose stages do not say which layers they hold.

    A region is named by one layer. Where several layers share a region here, the layers of a stage may be shared differently.
    Example: attention layers 0, 2, 4 and states 1, 3, 5 share memory in pairs (0, 1), (2, 3), (4, 5) here. Stage 0 of two holds
    layers 0 to 2 and names its regions 0 and 2, but that of 2 holds no layer 3.
    """
    shared = [slot for slot in _slots(local) if len({layer for view in slot for layer in _layers(local, view)}) > 1]
    if shared or not metadata.region_names:
        why = "layers of this model share regions" if shared else "its regions have no names"
        raise _refusal(
            "pipeline-regions-ambiguous",
            f"the stages of the peer's pipeline do not tell which layers they hold: {why}; read from an engine without pipeline "
            "stages, or one with this connector",
            shared_regions=len(shared),
            names=len(metadata.region_names or ()),
        )


def _layers(local: GeometryDocument, view: int) -> list[str]:
    return [layer for layer, *_ in local["regions"][view]["members"]]


def _slots(local: GeometryDocument) -> list[list[int]]:
    """Return our regions' numbers by base address, in the natural order of the first layer that each address holds."""
    by_base: dict[int, list[int]] = {}
    for number, region in enumerate(local["regions"]):
        by_base.setdefault(region["base_address"], []).append(number)

    return sorted(
        by_base.values(), key=lambda views: min(natural(layer) for view in views for layer in _layers(local, view))
    )


def _assign(local: GeometryDocument, metadata: AgentMetadata) -> list[tuple[int, list[int]]]:
    """Return (number of the peer's region, numbers of our regions of the same layers)."""
    slots = _slots(local)
    if not metadata.region_names:
        count = len(metadata.kv_caches_base_addr)
        if len(slots) != count:
            raise _refusal(
                "region-count-differs",
                f"the peer registered {count} regions, this rank {len(slots)}; without region names they must pair up one to one",
                local=len(slots),
                peer=count,
            )
        return list(enumerate(slots))
    by_layer = {layer: slot for slot in slots for view in slot for layer in _layers(local, view)}
    for number, name in enumerate(metadata.region_names):
        if name not in by_layer:
            message = f"the peer's region {number} is named {name[:80]!r}, which is no layer of this rank"
            raise _refusal("layer-not-held", message, layer=name[:80])
    return [(number, by_layer[name]) for number, name in enumerate(metadata.region_names)]


def _is_state(document: GeometryDocument, region: RegionDocument) -> bool:
    return any(document["groups"][group]["kind"] == "state" for _, _, group, _ in region["members"])


def _placed(
    local: GeometryDocument,
    theirs: RegionDocument,
    metadata: AgentMetadata,
    *,
    ours: RegionDocument,
    number: int,
    padded: set[int],
) -> RegionDocument:
    """Return one of the peer's regions at its real address, after checking the page length that the peer sent."""
    pages_per_page = metadata.physical_blocks_per_logical_kv_block if _is_state(local, ours) else 1
    page_bytes, needed = metadata.block_lens[number] * pages_per_page, theirs["page_bytes"]
    padding = ours["page_bytes"] - sum(extent_bytes(local["layouts"][layout]) for _, layout, _, _ in ours["members"])
    is_exact = page_bytes in {needed, needed + padding}
    if needed > page_bytes or not (is_exact or ours["base_address"] in padded):
        layer = ours["members"][0][0]
        raise _refusal(
            "page-bytes-differ",
            f"the peer's pages of layer {layer!r} are {page_bytes} bytes; the same model on its shard needs {needed}: check "
            "model, dtype, block size and tensor-parallel size",
            layer=layer,
            expected=needed,
            peer=page_bytes,
        )
    kind = metadata.region_mem_types[number] if metadata.region_mem_types else ours["memory_kind"]
    strides, counts = metadata.block_strides or metadata.block_lens, metadata.region_num_blocks
    return RegionDocument(
        base_address=metadata.kv_caches_base_addr[number],
        page_bytes=page_bytes,
        page_stride_bytes=strides[number] * pages_per_page,
        page_count=(counts[number] if counts else metadata.num_blocks) // pages_per_page,
        memory_kind=cast("MemoryKind", kind),
        device=0 if kind == "DRAM" else metadata.device_id,
        members=theirs["members"],
    )


def _check_states(peer: GeometryDocument, sent: tuple[int, ...]) -> None:
    """Raise unless the (convolution, recurrent state) bytes that the peer sent are those of our states, resharded for it."""
    members = (member for region in peer["regions"] for member in region["members"] if any(sent))
    for layer, layout, group, _ in members:
        if peer["groups"][group]["kind"] == "state":
            fields = peer["layouts"][layout]
            conv = sum(held_bytes(field) for field in fields if field["name"].startswith("conv"))
            sizes = (conv, sum(held_bytes(field) for field in fields) - conv)
            if sizes != sent:
                raise _refusal(
                    "state-bytes-differ",
                    f"the peer's states of layer {layer!r} are {list(sent)} bytes (conv, ssm); the same model on its "
                    f"shard has {list(sizes)}",
                    expected=list(sizes),
                    peer=list(sent),
                )


_MAX_DOCUMENT_BYTES = 16 * 2**20
_MAX_DOCUMENT_VALUES = 1 << 19
"""Most commas and brackets of a document, counted before it is read: a value of two bytes takes sixty in memory."""


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

    def __init__(self, reshard: Callable[..., Mapping[str, object]], dealt_groups: Sequence[bool]) -> None:
        self._reshard = reshard
        self._dealt_groups = tuple(dealt_groups)

    def document(
        self, local: GeometryDocument, metadata: AgentMetadata, rank: tuple[int, int], sizes: PeerSizes
    ) -> Mapping[str, object]:
        """Return the document of a (pp, tp) rank: the one that it sent, or, of vLLM's own connector, one derived from ours.

        Args:
            local: Our document, of the same model.
            metadata: What the peer sent; the handshake has checked its numbers and the lengths of its lists.
            rank: (pp, tp) of the peer's rank.
            sizes: Parallel sizes of the peer's engine.

        Raises:
            AdapterError: `bad-geometry-document`, `page-bytes-differ`, `state-bytes-differ`, `region-count-differs`,
                `layer-not-held`, `pipeline-regions-ambiguous`; or the planner's errors.
        """
        if metadata.geometry is not None:
            return _unpack(metadata.geometry)
        if sizes.pp > 1:
            _check_stages_can_be_told(local, metadata)
        document = self._reshard(
            local,
            tp_size=sizes.tp,
            tp_rank=rank[1],
            page_tokens=metadata.block_size,
            pages_per_block=metadata.physical_blocks_per_logical_kv_block,
            pp_size=sizes.pp,
            pp_rank=rank[0],
            context_sizes=tuple(sizes.dcp if is_dealt else 1 for is_dealt in self._dealt_groups),
            order=_ORDERS.get(metadata.kv_cache_layout),
        )
        peer = cast("GeometryDocument", document)
        _check_states(peer, tuple(metadata.ssm_sizes))
        # Groups that share memory with states have pages padded to the states' size.
        padded = {region["base_address"] for region in local["regions"] if _is_state(local, region)}
        regions = [
            _placed(local, peer["regions"][view], metadata, ours=local["regions"][view], number=number, padded=padded)
            for number, views in _assign(local, metadata)
            for view in views
        ]
        return {**document, "regions": regions}

    def check_context(self, groups: Iterable[GroupDocument], sizes: PeerSizes) -> None:
        """Raise a coded error if an engine's groups deal out their tokens to other sizes than its ticket says.

        A client may change an unsealed ticket, and an engine must not be set up twice with two sizes.
        """
        context = max((group.get("context", (1, 0, 1))[0] for group in groups), default=1)
        if any(self._dealt_groups) and context != sizes.dcp:
            message = f"a ticket says that the peer has {sizes.dcp} context ranks, but its pages are those of {context}"
            raise _refusal("context-size-differs", message, dcp=sizes.dcp, found=context)

    @staticmethod
    def value_count(metadata: AgentMetadata) -> int:
        """Return the approximate number of values in a peer rank's document; 0 if it sends none."""
        return _count_values(metadata.geometry) if metadata.geometry is not None else 0

    @staticmethod
    def memory_kind(metadata: AgentMetadata) -> MemoryKind:
        """Return the memory kind of the peer's pages; DRAM if it announces none."""
        kinds = set(metadata.region_mem_types or ("DRAM",))
        if len(kinds) != 1 or not kinds <= {"DRAM", "VRAM"}:
            few = sorted(kinds)[:4]
            message = f"the peer's regions are of the memory kinds {few}; one of DRAM and VRAM is supported"
            raise _refusal("mixed-memory-kinds", message, kinds=few)
        return cast("MemoryKind", kinds.pop())


def _unpack(raw: bytes) -> Mapping[str, object]:
    is_short = len(raw) <= _MAX_DOCUMENT_BYTES and _count_values(raw) <= _MAX_DOCUMENT_VALUES
    try:
        document: object = json.loads(raw) if is_short else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        message = f"the peer's geometry document ({len(raw)} bytes) is not a JSON object"
        raise _refusal("bad-geometry-document", message, length_bytes=len(raw))
    return cast("dict[str, object]", document)


def _count_values(raw: bytes) -> int:
    return sum(raw.count(mark) for mark in (b",", b"[", b"{"))
