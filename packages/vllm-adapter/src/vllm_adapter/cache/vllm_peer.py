"""Geometry of a peer that runs vLLM's own connector, derived from our document because the peer sends numbers only.

Theory of operation. The peer runs the same model, so its layers have our fields; its shard, block size, order of heads and
tokens, and addresses may differ. The planner reshards our document to the peer's rank; this module places the result at the
addresses that the peer sent, and checks every length that it sent against the one that follows from the model. Regions are named
by layer; without names they are in the natural order of layer names, as that connector registers them. Layers that share a
region here share one at the peer.

Worked example. Our tp 1 keeps layers.0 in pages of 16 tokens x 8 heads x 256 bytes = 32 768 bytes. A peer of tp 2 with blocks of
32 tokens must have 32 x 4 x 256 = 32 768 bytes too; one that says 65 536 runs another model or another tensor-parallel size, and
is refused (`page-bytes-differ`). State pages take several kernel blocks: with 10 per block and `block_lens` 4 096 the state's
page is 40 960 bytes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, cast

from vllm_adapter.cache.documents import RegionDocument, with_names
from vllm_adapter.cache.fields import extent_bytes, held_bytes
from vllm_adapter.cache.vllm_facts import read_facts
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.cache.documents import GeometryDocument, HeadOrder, PeerSizes
    from vllm_adapter.cache.vllm_facts import PeerFacts
    from vllm_adapter.ports import MemoryKind

__all__ = ["PeerShape", "derive_document"]


class PeerShape(NamedTuple):
    """The peer's rank, as the planner reshards to it; the members are those of kv-topology's `RankShape`, in its order."""

    tp_size: int
    tp_rank: int
    page_tokens: int
    pages_per_block: int
    pp_size: int
    pp_rank: int
    context_sizes: tuple[int, ...]
    order: HeadOrder | None


def derive_document(
    local: GeometryDocument,
    peer_facts: Mapping[str, object],
    rank: tuple[int, int],
    sizes: PeerSizes,
    *,
    reshard: Callable[[Mapping[str, object], PeerShape], Mapping[str, object]],
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
    shape = PeerShape(
        tp_size=sizes.tp,
        tp_rank=rank[1],
        page_tokens=facts.page_tokens,
        pages_per_block=facts.pages_per_block,
        pp_size=sizes.pp,
        pp_rank=rank[0],
        context_sizes=tuple(sizes.dcp if is_dealt else 1 for is_dealt in dealt_groups),
        order=facts.order,
    )
    peer = with_names(reshard(local, shape))
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
