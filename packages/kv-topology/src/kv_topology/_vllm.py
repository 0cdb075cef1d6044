"""vLLM's own connector as a peer: it sends numbers, not geometry, so the geometry is derived from ours.

Theory of operation. The peer runs the same model, so its layers have our fields; what differs is the shard, the block
size, the order of heads and tokens, and the addresses. Our layouts are re-sharded to the peer's rank and placed at the
addresses it sent, and every length that it sent is checked against what follows from that. Its regions are named by
layer; without names they are in the natural order of layer names, as that connector registers them. Layers that share a
region here share one there.

Source: the metadata of vLLM's own connector, versions 3 to 15 (block lengths and strides in bytes, block size in kernel
tokens, one region per layer from vLLM 0.27 on).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast, final

from kv_topology._document import from_document, to_document
from kv_topology._errors import GeometryMismatch, InvalidGeometry
from kv_topology._model import Group, Member, RankGeometry, Region
from kv_topology._reshard import reshard_layout
from kv_topology._shards import TokenDeal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._model import Layout, MemoryKind

__all__ = ["peer_document_from_vllm", "peer_geometry_from_vllm", "state_pages_per_block"]

_ORDERS = {"HND": "HN", "LBHNC": "HN", "BLHNC": "HN", "NHD": "NH", "LBNHC": "NH", "BLNHC": "NH"}


def state_pages_per_block(ssm_sizes: Sequence[int], page_bytes: int) -> int:
    """Return how many attention pages a state page takes: ceil((conv + ssm) / page).

    Source: the rule by which vLLM's connector of version 2 reconstructs the number; later versions send it.
    """
    return -(-sum(ssm_sizes) // page_bytes)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which layers.10 follows layers.2, and numbers come before words."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


@final
class _Facts:
    """The peer's numbers, read with a coded error for each that is missing or malformed."""

    def __init__(self, facts: Mapping[str, object]) -> None:
        self._facts = facts
        self.addresses = self.numbers("kv_caches_base_addr")
        self.page_bytes = self.numbers("block_lens", len(self.addresses))
        self.strides = self.optional_numbers("block_strides", len(self.addresses)) or self.page_bytes
        self.block_tokens = self.number("block_size")
        self.pages = self.number("num_blocks")
        self.page_counts = self.optional_numbers("region_num_blocks", len(self.addresses)) or [self.pages] * len(
            self.addresses
        )
        self.ratio = self.number("physical_blocks_per_logical_kv_block", 1)
        self.device = self.number("device_id", 0)
        self.ssm_sizes = self.optional_numbers("ssm_sizes", None)
        self.names = self._texts("region_names")
        self.memory_kinds = self._texts("region_mem_types")
        self.order = _ORDERS.get(str(facts.get("kv_cache_layout", "")))

    def _bad(self, name: str, expected: str) -> InvalidGeometry:
        shown = repr(self._facts.get(name))[:80]
        return InvalidGeometry(
            f"The peer's {name} must be {expected}, not {shown}.",
            code="peer-facts-malformed",
            fault="peer",
            context={"name": name},
        )

    def number(self, name: str, default: int | None = None) -> int:
        """Return a non-negative integer."""
        value = self._facts.get(name, default)
        if type(value) is not int or value < 0 or (value == 0 and name != "device_id"):
            raise self._bad(name, "a positive integer")
        return value

    def numbers(self, name: str, count: int | None = None) -> list[int]:
        """Return a list of non-negative integers, of that many if `count` is given."""
        value = self._facts.get(name)
        items = list(cast("Sequence[object]", value)) if isinstance(value, (list, tuple)) else None
        if items is None or len(items) > 1 << 16 or (count is not None and len(items) != count):
            raise self._bad(name, f"a list of {count if count is not None else 'at most 65536'} integers")
        numbers = [item for item in items if type(item) is int and item >= 0]
        if len(numbers) != len(items):
            raise self._bad(name, "a list of non-negative integers")
        return numbers

    def optional_numbers(self, name: str, count: int | None) -> list[int]:
        """Return the list, or an empty one if the peer did not send it."""
        return self.numbers(name, count) if self._facts.get(name) else []

    def _texts(self, name: str) -> list[str]:
        value = self._facts.get(name)
        if not value:
            return []
        items = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else ()
        texts = [item for item in items if isinstance(item, str)]
        if len(texts) != len(self.addresses):
            raise self._bad(name, f"a list of {len(self.addresses)} strings")
        return texts


def _slots(local: RankGeometry) -> list[list[Region]]:
    """Return our regions by base address, in the natural order of the first layer that each address holds."""
    by_base: dict[int, list[Region]] = {}
    for region in local.regions:
        by_base.setdefault(region.base_address, []).append(region)
    return sorted(by_base.values(), key=lambda views: min(_natural(m.layer) for v in views for m in v.members))


def _assign(local: RankGeometry, facts: _Facts) -> list[tuple[int, list[Region]]]:
    """Return (number of the peer's region, our regions of the same layers)."""
    slots = _slots(local)
    if not facts.names:
        if len(slots) != len(facts.addresses):
            raise GeometryMismatch(
                f"The peer registered {len(facts.addresses)} regions, this rank {len(slots)}; "
                "without region names they must pair up one to one.",
                code="region-count-differs",
                fault="peer",
                context={"local": len(slots), "peer": len(facts.addresses)},
            )
        return list(enumerate(slots))
    by_layer = {member.layer: slot for slot in slots for view in slot for member in view.members}
    pairs: list[tuple[int, list[Region]]] = []
    for number, name in enumerate(facts.names):
        if name not in by_layer:
            raise GeometryMismatch(
                f"The peer's region {number} is named {name!r}, which is no layer of this rank.",
                code="layer-not-held",
                fault="peer",
                context={"layer": name},
            )
        pairs.append((number, by_layer[name]))
    return pairs


def _groups(local: RankGeometry, facts: _Facts, tp_rank: int, dcp: int) -> tuple[Group, ...]:
    groups: list[Group] = []
    for group in local.groups:
        if group.is_state:
            groups.append(Group("state", 0))
            continue
        block = facts.block_tokens * facts.ratio
        deal = TokenDeal(dcp, tp_rank % dcp, block) if dcp > 1 else TokenDeal()
        groups.append(Group(group.kind, block, facts.ratio, group.window_tokens, deal))
    return tuple(groups)


def peer_geometry_from_vllm(
    local: RankGeometry,
    peer_facts: Mapping[str, object],
    *,
    peer_tp: int,
    peer_tp_rank: int,
    peer_pp: int = 1,
    peer_pp_rank: int = 0,
    peer_dcp: int = 1,
) -> RankGeometry:
    """Return the geometry of a rank of vLLM's own connector, derived from ours and the numbers that it sent.

    Args:
        local: This rank, the same model.
        peer_facts: The peer's metadata by its own names: kv_caches_base_addr, block_lens, block_strides, block_size,
            num_blocks, kv_cache_layout, physical_blocks_per_logical_kv_block, ssm_sizes, device_id, and the
            region_* lists of later versions.
        peer_tp: The peer's tensor-parallel size.
        peer_tp_rank: Its rank.
        peer_pp: Its pipeline stages.
        peer_pp_rank: Its stage.
        peer_dcp: Its context-parallel size; tokens are dealt out by whole blocks.

    Raises:
        InvalidGeometry: `peer-facts-malformed`, or the numbers contradict each other.
        GeometryMismatch: `page-bytes-differ`, `state-bytes-differ`, `region-count-differs`, `layer-not-held`.
        UnsupportedTopology: `layout-not-dense`, `packed-block-needs-equal-pages`.
    """
    facts = _Facts(peer_facts)
    regions: list[Region] = []
    known: dict[int, Layout] = {}
    for number, slot in _assign(local, facts):
        has_states = any(local.groups[m.group].is_state for view in slot for m in view.members)
        for view in slot:
            for member in view.members:
                if id(member.layout) not in known:
                    known[id(member.layout)] = reshard_layout(
                        member.layout,
                        tp_size=peer_tp,
                        tp_rank=peer_tp_rank,
                        page_tokens=facts.block_tokens,
                        order=facts.order,
                    )
            regions.append(_peer_region(local, view, known, facts, number, is_padded=has_states))
    _check_states(local, known, facts)
    return RankGeometry(
        tp_size=peer_tp,
        tp_rank=peer_tp_rank,
        groups=_groups(local, facts, peer_tp_rank, peer_dcp),
        regions=tuple(regions),
        pp_size=peer_pp,
        pp_rank=peer_pp_rank,
        null_block=local.null_block,
    )


def _peer_region(
    local: RankGeometry, view: Region, known: Mapping[int, Layout], facts: _Facts, number: int, *, is_padded: bool
) -> Region:
    """Return the peer's counterpart of one of our regions after checking the page length that the peer sent."""
    pages_per_page = facts.ratio if local.groups[view.members[0].group].is_state else 1
    page_bytes = facts.page_bytes[number] * pages_per_page
    needed = 0
    members: list[Member] = []
    for member in sorted(view.members, key=lambda m: m.offset_bytes):
        layout = known[id(member.layout)]
        members.append(Member(member.layer, layout, member.group, needed))
        needed += layout.extent_bytes
    padding = view.page_bytes - sum(member.layout.extent_bytes for member in view.members)
    if needed > page_bytes or (needed + padding != page_bytes and not is_padded and needed != page_bytes):
        raise GeometryMismatch(
            f"The peer's pages of layer {view.members[0].layer!r} are {page_bytes} bytes; the same model on its shard "
            f"needs {needed}. Check model, dtype, block size and tensor-parallel size.",
            code="page-bytes-differ",
            fault="peer",
            context={"layer": view.members[0].layer, "expected": needed, "peer": page_bytes},
        )
    kind = facts.memory_kinds[number] if facts.memory_kinds else view.memory_kind
    return Region(
        facts.addresses[number],
        page_bytes,
        facts.strides[number] * pages_per_page,
        facts.page_counts[number] // pages_per_page,
        tuple(members),
        cast("MemoryKind", kind),
        0 if kind == "DRAM" else facts.device,
    )


def _check_states(local: RankGeometry, known: Mapping[int, Layout], facts: _Facts) -> None:
    """Raise unless the state sizes that the peer sent are those of our states, sharded for it."""
    if len(facts.ssm_sizes) != 2 or not any(facts.ssm_sizes):
        return
    for region in local.regions:
        for member in region.members:
            if local.groups[member.group].is_state:
                fields = known[id(member.layout)].fields
                conv = sum(field.held_bytes for field in fields if field.name.startswith("conv"))
                state = sum(field.held_bytes for field in fields) - conv
                if [conv, state] != facts.ssm_sizes:
                    raise GeometryMismatch(
                        f"The peer's states of layer {member.layer!r} are {facts.ssm_sizes} bytes (conv, ssm); the "
                        f"same model on its shard has {[conv, state]}.",
                        code="state-bytes-differ",
                        fault="peer",
                        context={"expected": [conv, state], "peer": facts.ssm_sizes},
                    )


def peer_document_from_vllm(
    local_document: Mapping[str, object],
    peer_facts: Mapping[str, object],
    *,
    peer_tp: int,
    peer_tp_rank: int,
    peer_pp: int = 1,
    peer_pp_rank: int = 0,
    peer_dcp: int = 1,
) -> dict[str, object]:
    """Return `peer_geometry_from_vllm` as documents in and out."""
    geometry = peer_geometry_from_vllm(
        from_document(local_document),
        peer_facts,
        peer_tp=peer_tp,
        peer_tp_rank=peer_tp_rank,
        peer_pp=peer_pp,
        peer_pp_rank=peer_pp_rank,
        peer_dcp=peer_dcp,
    )
    return to_document(geometry)
