"""Plans for reading from a peer engine, from the geometry that its ranks send, or that is derived from ours.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast, final

from vllm_adapter.cache.documents import RegionDocument, natural
from vllm_adapter.cache.fields import extent_bytes, held_bytes
from vllm_adapter.cache.geometry import whole_engine
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from vllm_adapter.cache.documents import FieldDocument, GeometryDocument, GroupDocument, HeadOrder
    from vllm_adapter.ports import AgentMetadata, MemoryKind, PeerAddress, PeerPlan, Planner

__all__ = ["ELEMENT_BYTES", "PeerPlanner", "PeerRank", "pack_document", "peer_memory_kind"]

_HEAD_ORDERS: dict[str, HeadOrder] = {
    "HND": "HN",
    "LBHNC": "HN",
    "BLHNC": "HN",
    "NHD": "NH",
    "LBNHC": "NH",
    "BLNHC": "NH",
}


_DESCRIBED = (
    {"key", "value"},
    {"latent"},
    {"channel_key", "channel_value"},
    {"tiled_key", "tiled_value"},
    {"conv_x", "conv_b", "conv_c", "ssm"},
)
"""Fields of layers whose bytes a document describes in full, without a packing and above one byte an element.

All others are known by a name (back end, kind of state), or by an encoding with scales (8-bit and packed caches), which may mean
other bytes in another release. Source: writers and layers of vLLM 0.31 to 0.33.
"""
ELEMENT_BYTES = {
    "torch.float8_e4m3fn": 1,
    "torch.float8_e5m2": 1,
    "torch.float16": 2,
    "torch.bfloat16": 2,
    "torch.float32": 4,
}
"""Types of elements that are cast on arrival to types of more bytes, which hold all their numbers, but for float16 (`_cast`). Not
to one of fewer or as many: vLLM's kernels saturate, and those for CPUs cut digits off, where a cast makes NaN and rounds."""
_READ_MINORS = frozenset({"0.31", "0.32", "0.33"})
"""Releases whose layers were compared."""


def _cast(ours: object, theirs: object) -> tuple[str, int, str, int] | None:
    """Return how a peer's elements become ours, as kv-topology's `Cast`; None if no cast is needed, or none is exact."""
    source, target = (next((name for name in ELEMENT_BYTES if each == [[name]]), "") for each in (theirs, ours))
    # The pages of a read that failed hold narrow elements, which seen as float16 may be infinite.
    if not source or target in {"", "torch.float16"} or ELEMENT_BYTES[source] >= ELEMENT_BYTES[target]:
        return None
    return source, ELEMENT_BYTES[source], target, ELEMENT_BYTES[target]


def _minor(release: str) -> str:
    return ".".join(release.partition("+")[0].split(".")[:2])


def _refusal(code: str, message: str, **context: object) -> AdapterError:
    return AdapterError(message, code=code, fault="peer", context=context)


def _check_stages_can_be_known(local: GeometryDocument, metadata: AgentMetadata) -> None:
    """Refuse a peer whose regions do not say which layers they hold, where either engine has pipeline stages.

    A region is named by one layer. Where several layers share a region here, the layers of a stage may be shared differently.
    Example: attention layers 0, 2, 4 and states 1, 3, 5 share memory in pairs (0, 1), (2, 3), (4, 5) here. Stage 0 of two holds
    layers 0 to 2 and names its regions 0 and 2, but that of 2 holds no layer 3.
    """
    shared = [slot for slot in _slots(local) if len({layer for view in slot for layer in _layers(local, view)}) > 1]
    if shared or not metadata.region_names:
        why = "layers of this model share regions" if shared else "its regions have no names"
        raise _refusal(
            "pipeline-regions-ambiguous",
            f"the peer's regions do not tell which layers they hold, and with pipeline stages that cannot be derived: {why}; "
            "give neither engine pipeline stages, or this connector to both",
            shared_regions=len(shared),
            names=len(metadata.region_names or ()),
        )


def _check_parts_are_known(local: GeometryDocument, peer_tp: int) -> None:
    """Refuse a peer of another tensor-parallel size where pages are in an order of which only a rank's whole page is known."""
    for region in local["regions"]:
        for layer, layout, *_ in region["members"]:
            if any(axis[0] == "shard" for field in local["layouts"][layout] for axis in field["axes"]):
                message = (
                    f"the peer has {peer_tp} tensor-parallel ranks, this engine {local['tp'][0]}, and which parts of layer "
                    f"{layer!r} each of them has is unknown: give both the same --tensor-parallel-size"
                )
                raise _refusal("page-bytes-differ", message, layer=layer, peer=peer_tp)


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
            # A single tensor is the first of the peer's pair, and a page in an unknown order may be both.
            if sizes != sent and (conv or sizes[1] != sum(sent)):
                raise _refusal(
                    "state-bytes-differ",
                    f"the peer's states of layer {layer!r} are {list(sent)} bytes (conv, ssm); the same model on its "
                    f"shard has {list(sizes)}",
                    expected=list(sizes),
                    peer=list(sent),
                )


def _regions(local: GeometryDocument, peer: GeometryDocument, metadata: AgentMetadata) -> list[RegionDocument]:
    """Return the regions of a peer's document, made from ours, at the addresses that it sent."""
    _check_states(peer, tuple(metadata.ssm_sizes))
    # Groups that share memory with states have pages padded to the states' size.
    padded = {region["base_address"] for region in local["regions"] if _is_state(local, region)}
    return [
        _placed(local, peer["regions"][view], metadata, ours=local["regions"][view], number=number, padded=padded)
        for number, views in _assign(local, metadata)
        for view in views
    ]


_MAX_DOCUMENT_BYTES = 16 * 2**20
_MAX_DOCUMENT_VALUES = 1 << 19
"""Most commas and brackets of a document, counted before it is read: a value of two bytes takes sixty in memory."""


def pack_document(document: Mapping[str, object]) -> bytes:
    """Return a geometry document as it travels (UTF-8 JSON)."""
    return json.dumps(document, separators=(",", ":")).encode()


def peer_memory_kind(metadata: AgentMetadata) -> MemoryKind:
    """Return the memory kind of the peer's pages; DRAM if it announces none.

    Raises:
        AdapterError: `mixed-memory-kinds`.
    """
    kinds = set(metadata.region_mem_types or ("DRAM",))
    if len(kinds) != 1 or not kinds <= {"DRAM", "VRAM"}:
        few = sorted(kinds)[:4]
        message = f"the peer's regions are of the memory kinds {few}; one of DRAM and VRAM is supported"
        raise _refusal("mixed-memory-kinds", message, kinds=few)
    return cast("MemoryKind", kinds.pop())


def _unpack(raw: bytes) -> Mapping[str, object]:
    """Return a geometry document that a peer sent.

    Raises:
        AdapterError: `bad-geometry-document`.
    """
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


_MOST_VALUES = 1 << 22
"""Most values in the geometry documents of all ranks of a peer; 64 ranks with 300 KB each have a third of that."""


class PeerRank(NamedTuple):
    """A peer's rank (pp, tp), its geometry for the planner, and its cache groups."""

    rank: tuple[int, int]
    geometry: object
    groups: Sequence[GroupDocument]


@final
@dataclass(frozen=True, slots=True)
class PeerPlanner:
    """Plans from this rank's geometry document and those of a peer engine's ranks.

    Attributes:
        document: This rank's geometry document.
        dealt_groups: Whether context parallelism deals out the tokens of each group.
        reshard: Makes the document of another rank from this one's, for peers that send none.
        planner: Plans from geometry documents.
        local_kind: Memory kind of this rank's pages.
        release: vLLM's version here: of peers of another one only pages that are described in full are read. Empty: of all.
        drafts_states: Whether states have rows for drafts, whose order is a release's own.
        cache_dtype: The factor of this name here: of a peer with another one, only elements of known types are read.
        stages: Documents of all of this engine's pipeline stages at this tensor-parallel rank; may be empty for one stage.
    """

    document: GeometryDocument
    dealt_groups: Sequence[bool]
    reshard: Callable[..., Mapping[str, object]]
    planner: Planner
    local_kind: MemoryKind
    stages: Sequence[GeometryDocument] = ()
    release: str = ""
    drafts_states: bool = False
    cache_dtype: object = None

    @property
    def model(self) -> GeometryDocument:
        """The document of all layers of the model: peers that send none may hold layers that other stages of ours have."""
        return whole_engine(self.stages) if len(self.stages) > 1 else self.document

    def target_ranks(self, peer: PeerAddress) -> Sequence[tuple[int, int]]:
        """Return the ranks whose metadata `plan` needs; raises a coded error for impossible sizes."""
        return self.planner.target_ranks(self.document, peer_tp=peer.tp, peer_pp=peer.pp, peer_dcp=peer.dcp)

    def check_sizes(self, peer: PeerAddress, first: AgentMetadata) -> None:
        """Raise a coded error if rank (0, 0)'s metadata shows that an engine of vLLM's own connector has other sizes.

        Our own listeners need no such check: they refuse a query for a missing rank and stay alive.
        """
        if first.geometry is not None or first.capabilities:
            return
        layers = {layer for region in self.model["regions"] for layer, *_ in region["members"]}
        if peer.pp > 1 and layers <= {*(first.region_names or ())}:
            message = f"a ticket says that the peer has {peer.pp} pipeline ranks, but the first holds all layers of this engine"
            raise _refusal("pipeline-size-differs", message, pp=peer.pp)
        try:
            self.peer_document(first, (0, 0), peer)
        except AdapterError as error:
            # The first rank of a pipeline may hold only some of our layers; those are compared when the reads are planned.
            if peer.pp == 1 or error.code not in {"layer-not-held", "region-count-differs"}:
                raise

    def peer_document(self, metadata: AgentMetadata, rank: tuple[int, int], peer: PeerAddress) -> Mapping[str, object]:
        """Return the document of a peer's rank: the one that it sent, or, of vLLM's own connector, one derived from ours.

        Args:
            metadata: What the rank sent; the handshake has checked its numbers and the lengths of its lists.
            rank: (pp, tp) of the peer's rank.
            peer: The peer's engine, for its parallel sizes.

        Raises:
            AdapterError: `bad-geometry-document`, `page-bytes-differ`, `state-bytes-differ`, `region-count-differs`,
                `layer-not-held`, `pipeline-regions-ambiguous`, `context-turns`; or the planner's errors.
        """
        if metadata.geometry is not None:
            return _unpack(metadata.geometry)
        model = self.model
        deals = [(group["block_tokens"], group["context"]) for group in model["groups"]]
        if peer.dcp > 1 and any(size > 1 and turn != block_tokens for block_tokens, (size, _, turn) in deals):
            message = (
                "the peer does not tell which tokens each of its context ranks has; whole blocks in turn are supposed, but this "
                "engine's own ranks have parts of blocks: leave cp_kv_cache_interleave_size out on both, or use this connector "
                "on both"
            )
            raise _refusal("context-turns", message, dcp=peer.dcp)
        if peer.pp > 1 or len(self.stages) > 1:
            _check_stages_can_be_known(model, metadata)
        if peer.tp != model["tp"][0]:
            _check_parts_are_known(model, peer.tp)
        document = self.reshard(
            model,
            tp_size=peer.tp,
            tp_rank=rank[1],
            page_tokens=metadata.block_size,
            pages_per_block=metadata.physical_blocks_per_logical_kv_block,
            pp_size=peer.pp,
            pp_rank=rank[0],
            context_sizes=tuple(peer.dcp if is_dealt else 1 for is_dealt in self.dealt_groups),
            order=_HEAD_ORDERS.get(metadata.kv_cache_layout),
        )
        return {**document, "regions": _regions(model, cast("GeometryDocument", document), metadata)}

    def read(self, peer: PeerAddress, metadata: Mapping[tuple[int, int], AgentMetadata]) -> Iterator[PeerRank]:
        """Read the ranks' geometry one by one, since a document may take some 80 ms and a peer may have many ranks.

        Raises a coded error for metadata that does not fit. A client may change an unsealed ticket, and an engine must not be
        set up twice with two context sizes.
        """
        values = 0
        for rank, entry in metadata.items():
            values += _count_values(entry.geometry or b"")
            if values > _MOST_VALUES:
                message = f"the geometry documents of {len(metadata)} ranks have more than {_MOST_VALUES} values"
                raise _refusal("bad-geometry-document", message, ranks=len(metadata))
            document = self.peer_document(entry, rank, peer)
            groups = cast("Sequence[GroupDocument]", document.get("groups", ()))
            found = PeerRank(rank, self.planner.geometry(document, rank), groups)
            self._check_release(entry, cast("GeometryDocument", document))
            context = max((group.get("context", (1, 0, 1))[0] for group in groups), default=1)
            if any(self.dealt_groups) and context != peer.dcp:
                message = (
                    f"a ticket says that the peer has {peer.dcp} context ranks, but its pages are those of {context}"
                )
                raise _refusal("context-size-differs", message, dcp=peer.dcp, found=context)
            yield found

    def _check_release(self, metadata: AgentMetadata, document: GeometryDocument) -> None:
        """Refuse a peer whose bytes may mean something else than ours although its document agrees."""
        if not self.release:
            return
        # A stage without layers of a group has no types of it, and no bytes.
        held = _held_groups(self.document) & _held_groups(document)
        pairs = enumerate(zip(self.document["groups"], document["groups"], strict=False))
        types = [
            (ours.get("element_types"), theirs.get("element_types"), ours["kind"] == "state")
            for number, (ours, theirs) in pairs
            if number in held
        ]
        is_other = bool(metadata.factors) and metadata.factors.get("cache_dtype") != self.cache_dtype
        is_cast = False
        for ours, theirs, is_state in types:
            if not is_state and _cast(ours, theirs) is not None:
                is_cast = True
            elif (ours and theirs and ours != theirs) or (is_other and not is_state and not (ours and theirs)):
                message = f"the peer's elements are {_shown(theirs)}, this engine's {_shown(ours)}, and no exact cast is known"
                raise _refusal("element-types-differ", message, local=ours, peer=_shown(theirs))
        # Without factors the hash was this engine's, and so is the release.
        release = str(metadata.factors.get("vllm_version", "unknown") if metadata.factors else self.release)[:80]
        if release == self.release:
            return
        minors = {_minor(release), _minor(self.release)}
        unlike = {field["name"] for fields in self.document["layouts"] if not _is_described(fields) for field in fields}
        if len(minors) > 1 and not minors <= _READ_MINORS:
            reason = f"pages were compared between vLLM {', '.join(sorted(_READ_MINORS))} alone"
        elif len(minors) > 1 and (
            metadata.geometry is None or any(ours and theirs is None for ours, theirs, _ in types)
        ):
            reason = "the peer does not describe its pages, or not the types of their elements"
        elif unlike or self.drafts_states or is_cast:
            what = ", ".join(sorted(unlike)) or (
                "states with drafts" if self.drafts_states else "elements of another type"
            )
            reason = f"the bytes of {what} may mean something else there"
        else:
            return
        message = f"the peer runs vLLM {release}, this engine {self.release}, and {reason}"
        raise _refusal("release-differs", message, local=self.release, peer=release)

    def plan(self, peer: PeerAddress, ranks: Iterable[PeerRank]) -> PeerPlan:
        """Plan the reads of this rank; raises a coded error for geometry that does not fit."""
        geometries: dict[tuple[int, int], object] = {}
        casts: dict[int, tuple[str, int, str, int]] = {}
        kinds: dict[int, object] = {}
        for rank, geometry, groups in ranks:
            geometries[rank] = geometry
            for number, (ours, theirs) in enumerate(zip(self.document["groups"], groups, strict=False)):
                types = theirs.get("element_types")
                # States move whole, also where pages are staged.
                cast = _cast(ours.get("element_types"), types) if ours["kind"] != "state" else None
                # A stage without layers of a group has no types of it.
                if types and kinds.setdefault(number, types) != types and (cast or number in casts):
                    message = f"its ranks have elements of {_shown(kinds[number])} and of {_shown(types)}"
                    raise _refusal("element-types-differ", message, group=number)
                if cast is not None:
                    casts[number] = cast
        return self.planner.plan(self.document, geometries, peer_tp=peer.tp, casts=casts)

    def has_our_blocks(self, ranks: Iterable[PeerRank], plan: PeerPlan) -> bool:
        """Return whether the groups of every rank that is read from have blocks of as many tokens as ours, and our windows."""
        ours = _spans(self.document["groups"])
        return all(_spans(groups) == ours for rank, _, groups in ranks if rank in plan.producer_ranks)


def _held_groups(document: GeometryDocument) -> set[int]:
    return {group for region in document["regions"] for _, _, group, _ in region["members"]}


def _shown(types: object) -> str:
    return str(types)[:80] if types else "not described"


def _is_described(fields: Sequence[FieldDocument]) -> bool:
    """Return whether a layer's document says all about its bytes."""
    is_plain = all(not field["packing"] and field["element_bytes"] > 1 for field in fields)
    return is_plain and {field["name"] for field in fields} in _DESCRIBED


def _spans(groups: Iterable[GroupDocument]) -> list[tuple[bool, int, int]]:
    """Return (whether it holds states, tokens per block over all context ranks, window) of each group."""
    return [
        (group["kind"] == "state", group["block_tokens"] * group["context"][0], group["window_tokens"])
        for group in groups
    ]
