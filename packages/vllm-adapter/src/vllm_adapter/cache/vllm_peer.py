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
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

from vllm_adapter.cache.documents import RegionDocument, with_names
from vllm_adapter.cache.fields import extent_bytes, held_bytes
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm_adapter.cache.documents import GeometryDocument, GroupDocument, HeadOrder, PeerSizes
    from vllm_adapter.ports import AgentMetadata, MemoryKind

__all__ = ["PeerFacts", "PeerGeometry", "derive_document", "pack_document", "read_facts"]

_MAX_REGIONS = 1 << 15
_ORDERS: dict[str, HeadOrder] = {
    "HND": "HN",
    "LBHNC": "HN",
    "BLHNC": "HN",
    "NHD": "NH",
    "LBNHC": "NH",
    "BLNHC": "NH",
}


@final
@dataclass(frozen=True, slots=True)
class PeerFacts:
    """The peer's numbers, by region where they are lists.

    Attributes:
        addresses: First byte of each region.
        page_bytes: Bytes of a kernel block.
        strides: Bytes from one kernel block to the next.
        page_counts: Kernel blocks.
        page_tokens: Tokens of a kernel block.
        pages_per_block: Kernel blocks of a scheduler block.
        device: Device number.
        state_bytes: Bytes of (convolution, recurrent state); empty if it has no state.
        names: Name of the layer of each region; empty if not sent.
        memory_kinds: Kind of memory of each region; empty if not sent.
        order: Order of heads and tokens; None if the layout has no such name.
    """

    addresses: tuple[int, ...]
    page_bytes: tuple[int, ...]
    strides: tuple[int, ...]
    page_counts: tuple[int, ...]
    page_tokens: int
    pages_per_block: int
    device: int
    state_bytes: tuple[int, ...]
    names: tuple[str, ...]
    memory_kinds: tuple[str, ...]
    order: HeadOrder | None


def read_facts(facts: Mapping[str, object]) -> PeerFacts:
    """Return the numbers of a peer's metadata by its own names; raises `AdapterError` (`peer-facts-malformed`)."""
    addresses = _numbers(facts, "kv_caches_base_addr")
    regions = len(addresses)
    page_bytes = _numbers(facts, "block_lens", regions)
    return PeerFacts(
        addresses=addresses,
        page_bytes=page_bytes,
        strides=_optional(facts, "block_strides", regions) or page_bytes,
        page_counts=_optional(facts, "region_num_blocks", regions) or (_number(facts, "num_blocks"),) * regions,
        page_tokens=_number(facts, "block_size"),
        pages_per_block=_number(facts, "physical_blocks_per_logical_kv_block", 1),
        device=_number(facts, "device_id", 0),
        state_bytes=_optional(facts, "ssm_sizes", None),
        names=_texts(facts, "region_names", regions),
        memory_kinds=_texts(facts, "region_mem_types", regions),
        order=_ORDERS.get(str(facts.get("kv_cache_layout", ""))),
    )


def _bad(facts: Mapping[str, object], name: str, expected: str) -> AdapterError:
    value = facts.get(name)
    shown = (
        f"a list of {len(cast('Sequence[object]', value))}" if isinstance(value, (list, tuple)) else repr(value)[:80]
    )
    return AdapterError(
        f"the peer's {name} must be {expected}, not {shown}",
        code="peer-facts-malformed",
        fault="peer",
        context={"name": name},
    )


def _number(facts: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = facts.get(name, default)
    if type(value) is not int or value < 0 or (value == 0 and name != "device_id"):
        raise _bad(facts, name, "a positive integer")
    return value


def _numbers(facts: Mapping[str, object], name: str, count: int | None = None) -> tuple[int, ...]:
    value = facts.get(name)
    items = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else None
    if items is None or not _has_length(items, count):
        raise _bad(facts, name, f"a list of {count if count is not None else f'at most {_MAX_REGIONS}'} integers")
    numbers = tuple(item for item in items if type(item) is int and item >= 0)
    if len(numbers) != len(items):
        raise _bad(facts, name, "a list of non-negative integers")
    return numbers


def _has_length(items: Sequence[object], count: int | None) -> bool:
    return len(items) <= _MAX_REGIONS and count in {None, len(items)}


def _optional(facts: Mapping[str, object], name: str, count: int | None) -> tuple[int, ...]:
    return _numbers(facts, name, count) if facts.get(name) else ()


def _texts(facts: Mapping[str, object], name: str, count: int) -> tuple[str, ...]:
    value = facts.get(name)
    if not value:
        return ()
    items = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else ()
    texts = tuple(item for item in items if isinstance(item, str))
    if len(texts) != count:
        raise _bad(facts, name, f"a list of {count} strings")
    return texts


def derive_document(
    local: GeometryDocument,
    peer_facts: Mapping[str, object],
    rank: tuple[int, int],
    sizes: PeerSizes,
    *,
    reshard: Callable[..., Mapping[str, object]],
    dealt_groups: Sequence[bool],
) -> GeometryDocument:
    """Return the geometry document of a rank of vLLM's own connector.

    Args:
        local: Our document, of the same model.
        peer_facts: The peer's metadata by its own names.
        rank: (pp, tp) of the peer's rank.
        sizes: Parallel sizes of the peer's engine.
        reshard: The planner's function for resharding documents.
        dealt_groups: Whether context parallelism deals out the tokens of each group.

    Raises:
        AdapterError: `peer-facts-malformed`, `page-bytes-differ`, `state-bytes-differ`, `region-count-differs`,
            `layer-not-held`, `pipeline-regions-ambiguous`; or the planner's errors.
    """
    facts = read_facts(peer_facts)
    if sizes.pp > 1:
        _check_stages_can_be_told(local, facts)
    document = reshard(
        local,
        tp_size=sizes.tp,
        tp_rank=rank[1],
        page_tokens=facts.page_tokens,
        pages_per_block=facts.pages_per_block,
        pp_size=sizes.pp,
        pp_rank=rank[0],
        context_sizes=tuple(sizes.dcp if is_dealt else 1 for is_dealt in dealt_groups),
        order=facts.order,
    )
    peer = with_names(document)
    _check_states(peer, facts)
    # Groups that share memory with states have pages padded to the states' size.
    padded = {region["base_address"] for region in local["regions"] if _is_state(local, region)}
    peer["regions"] = [
        _placed(local, peer["regions"][view], facts, ours=local["regions"][view], number=number, padded=padded)
        for number, views in _assign(local, facts)
        for view in views
    ]
    return peer


def _check_stages_can_be_told(local: GeometryDocument, facts: PeerFacts) -> None:
    """Refuse a pipeline whose stages do not say which layers they hold.

    A region is named by one layer. Where several layers share a region here, the layers of a stage may be shared differently.
    Example: attention layers 0, 2, 4 and states 1, 3, 5 share memory in pairs (0, 1), (2, 3), (4, 5) here. Stage 0 of two holds
    layers 0 to 2 and names its regions 0 and 2, but that of 2 holds no layer 3.
    """
    shared = [slot for slot in _slots(local) if len({layer for view in slot for layer in _layers(local, view)}) > 1]
    if shared or not facts.names:
        why = "layers of this model share regions" if shared else "its regions have no names"
        raise AdapterError(
            f"the stages of the peer's pipeline do not tell which layers they hold: {why}; read from an engine without pipeline "
            "stages, or one with this connector",
            code="pipeline-regions-ambiguous",
            fault="peer",
            context={"shared_regions": len(shared), "names": len(facts.names)},
        )


def _layers(local: GeometryDocument, view: int) -> list[str]:
    return [member.layer for member in local["regions"][view]["members"]]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which layers.10 follows layers.2, and numbers come before words."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _slots(local: GeometryDocument) -> list[list[int]]:
    """Return our regions' numbers by base address, in the natural order of the first layer that each address holds."""
    by_base: dict[int, list[int]] = {}
    for number, region in enumerate(local["regions"]):
        by_base.setdefault(region["base_address"], []).append(number)

    def first_layer(views: list[int]) -> list[tuple[int, int, str]]:
        return min(_natural(layer) for view in views for layer in _layers(local, view))

    return sorted(by_base.values(), key=first_layer)


def _assign(local: GeometryDocument, facts: PeerFacts) -> list[tuple[int, list[int]]]:
    """Return (number of the peer's region, numbers of our regions of the same layers)."""
    slots = _slots(local)
    if not facts.names:
        if len(slots) != len(facts.addresses):
            raise AdapterError(
                f"the peer registered {len(facts.addresses)} regions, this rank {len(slots)}; without region names they must "
                "pair up one to one",
                code="region-count-differs",
                fault="peer",
                context={"local": len(slots), "peer": len(facts.addresses)},
            )
        return list(enumerate(slots))
    by_layer = {layer: slot for slot in slots for view in slot for layer in _layers(local, view)}
    pairs: list[tuple[int, list[int]]] = []
    for number, name in enumerate(facts.names):
        if name not in by_layer:
            raise AdapterError(
                f"the peer's region {number} is named {name[:80]!r}, which is no layer of this rank",
                code="layer-not-held",
                fault="peer",
                context={"layer": name[:80]},
            )
        pairs.append((number, by_layer[name]))
    return pairs


def _is_state(document: GeometryDocument, region: RegionDocument) -> bool:
    return any(document["groups"][member.group]["kind"] == "state" for member in region["members"])


def _placed(
    local: GeometryDocument,
    theirs: RegionDocument,
    facts: PeerFacts,
    *,
    ours: RegionDocument,
    number: int,
    padded: set[int],
) -> RegionDocument:
    """Return one of the peer's regions at its real address, after checking the page length that the peer sent."""
    pages_per_page = facts.pages_per_block if _is_state(local, ours) else 1
    page_bytes, needed = facts.page_bytes[number] * pages_per_page, theirs["page_bytes"]
    padding = ours["page_bytes"] - sum(extent_bytes(local["layouts"][member.layout]) for member in ours["members"])
    is_exact = page_bytes in {needed, needed + padding}
    if needed > page_bytes or not (is_exact or ours["base_address"] in padded):
        layer = ours["members"][0].layer
        raise AdapterError(
            f"the peer's pages of layer {layer!r} are {page_bytes} bytes; the same model on its shard needs {needed}: check "
            "model, dtype, block size and tensor-parallel size",
            code="page-bytes-differ",
            fault="peer",
            context={"layer": layer, "expected": needed, "peer": page_bytes},
        )
    kind = facts.memory_kinds[number] if facts.memory_kinds else ours["memory_kind"]
    return RegionDocument(
        base_address=facts.addresses[number],
        page_bytes=page_bytes,
        page_stride_bytes=facts.strides[number] * pages_per_page,
        page_count=facts.page_counts[number] // pages_per_page,
        memory_kind=cast("MemoryKind", kind),
        device=0 if kind == "DRAM" else facts.device,
        members=theirs["members"],
    )


def _check_states(peer: GeometryDocument, facts: PeerFacts) -> None:
    """Raise unless the state sizes that the peer sent are those of our states, resharded for it."""
    if len(facts.state_bytes) != 2 or not any(facts.state_bytes):
        return
    for region in peer["regions"]:
        for member in region["members"]:
            if peer["groups"][member.group]["kind"] == "state":
                fields = peer["layouts"][member.layout]
                conv = sum(held_bytes(field) for field in fields if field["name"].startswith("conv"))
                sizes = (conv, sum(held_bytes(field) for field in fields) - conv)
                if sizes != facts.state_bytes:
                    raise AdapterError(
                        f"the peer's states of layer {member.layer!r} are {list(facts.state_bytes)} bytes (conv, ssm); the "
                        f"same model on its shard has {list(sizes)}",
                        code="state-bytes-differ",
                        fault="peer",
                        context={"expected": list(sizes), "peer": list(facts.state_bytes)},
                    )


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

    def __init__(self, reshard: Callable[..., Mapping[str, object]], dealt_groups: Sequence[bool]) -> None:
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
