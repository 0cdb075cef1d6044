"""Geometry of one rank: everything that it registered, checked when it is made; and checks against a peer's.

Everything here may come from a peer: coded errors, bounded work. The work of a check is proportional to the numbers in the
geometry, whose count a document limits before it is read. Work that could cost more (comparing the bytes of fields) is
charged to one budget per geometry before it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, final

from kv_topology.arithmetic import even_interval
from kv_topology.checks import LIMITS, Budget, check_disjoint, check_in_range, check_layout, clusters
from kv_topology.errors import GeometryMismatch, InvalidGeometry, shown
from kv_topology.model import Group, Member, Region, StageLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_topology.model import FieldLayout, Layout

    Placed = tuple[tuple[int, Member], ...]
    """The members of one layer on one side, each with its region number."""

__all__ = ["RankGeometry", "check_fields_match", "check_groups_match", "check_names_match"]


@final
@dataclass(frozen=True)
class RankGeometry:
    """Everything that one rank registered.

    Attributes:
        tp_size: Tensor-parallel ranks of the engine.
        tp_rank: This rank among them.
        groups: KV-cache groups, in the order of the scheduler's block lists.
        regions: Registered memory.
        pp_size: Pipeline stages of the engine.
        pp_rank: This rank's stage.
        stage_layers: Layers by stage; needed of a consumer with more than one stage, else empty.
        null_block: Block id that stands for "no block" in lists that name none themselves, or None.
    """

    tp_size: int
    tp_rank: int
    groups: tuple[Group, ...]
    regions: tuple[Region, ...]
    pp_size: int = 1
    pp_rank: int = 0
    stage_layers: tuple[tuple[StageLayer, ...], ...] = ()
    null_block: int | None = None

    def __post_init__(self) -> None:
        """Refuse a geometry that contradicts itself (`InvalidGeometry`), so that every value in use is sound."""
        try:
            _check_geometry(self)
        except (AttributeError, TypeError) as error:  # a part that is not what the check takes it for
            raise InvalidGeometry("geometry-malformed", f"A part of the geometry has another type: {error}.") from error

    def __repr__(self) -> str:
        sizes = f"rank {self.pp_rank, self.tp_rank} of {self.pp_size, self.tp_size}"
        return f"<RankGeometry: {sizes}, {len(self.groups)} groups, {len(self.regions)} regions, {len(self.layers)} layers>"

    @cached_property
    def placements(self) -> Mapping[str, tuple[tuple[int, Member], ...]]:
        """(region number, member) pairs of each layer."""
        found: dict[str, list[tuple[int, Member]]] = {}
        for number, region in enumerate(self.regions):
            for member in region.members:
                found.setdefault(member.layer, []).append((number, member))
        return {layer: tuple(pairs) for layer, pairs in found.items()}

    @property
    def layers(self) -> tuple[str, ...]:
        """Layer names in registration order."""
        return tuple(self.placements)

    @property
    def own_layers(self) -> tuple[StageLayer, ...]:
        """This rank's layers with their groups and fields, as its stage's entry of `stage_layers` lists them."""
        return tuple(
            StageLayer(
                layer,
                placed[0][1].group,
                tuple(dict.fromkeys(part.name for _, member in placed for part in member.layout.fields)),
            )
            for layer, placed in self.placements.items()
        )


def _check_region(
    region: Region, number: int, group_count: int, extents: Mapping[Layout, int], known: set[object], budget: Budget
) -> None:
    where = f"region {number}"
    check_in_range("page_count", region.page_count, 1, LIMITS["page_count"], where)
    check_in_range("page_bytes", region.page_bytes, 1, LIMITS["page_bytes"], where)
    check_in_range("page_stride_bytes", region.page_stride_bytes, region.page_bytes, LIMITS["page_bytes"], where)
    check_in_range("base_address", region.base_address, 0, LIMITS["address"] - 1, where)
    check_in_range("end address", region.stop_address, 0, LIMITS["address"], where)
    check_in_range("device", region.device, 0, LIMITS["devices"], where)
    if region.memory_kind not in {"DRAM", "VRAM"}:
        raise InvalidGeometry("bad-memory-kind", f"{where} is in {region.memory_kind!r} memory; known: DRAM, VRAM.")
    by_group: dict[int, list[Member]] = {}
    for member in region.members:
        check_in_range(f"group of layer {member.layer!r}", member.group, 0, group_count - 1, where)
        check_in_range("offset_bytes", member.offset_bytes, 0, LIMITS["page_bytes"], f"{member.layer!r} in {where}")
        stop = member.offset_bytes + extents[member.layout]
        if stop > region.page_bytes:
            raise InvalidGeometry(
                "field-outside-page",
                f"Layer {member.layer!r} needs {stop} bytes of the pages of {where}, which have {region.page_bytes}.",
                {"needed_bytes": stop, "page_bytes": region.page_bytes},
            )
        by_group.setdefault(member.group, []).append(member)
    for members in by_group.values():
        pattern = tuple((member.layout, member.offset_bytes) for member in members)
        if len(members) > 1 and pattern not in known:
            known.add(pattern)
            fields = [
                (f"{field.name!r} of layer {member.layer!r}", field, member.offset_bytes + field.offset_bytes)
                for member in members
                for field in member.layout.fields
            ]
            check_disjoint(fields, where, budget)


def _check_group(group: Group, number: int, tp_rank: int) -> None:
    where = f"group {number}"
    if group.kind not in {"attention", "sliding-window", "latent", "state"}:
        known = "attention, sliding-window, latent, state"
        raise InvalidGeometry(
            "bad-group-kind", f"{where} is of kind {group.kind!r}; known: {known}.", {"kind": group.kind}
        )
    check_in_range("pages_per_block", group.pages_per_block, 1, LIMITS["axis_size"], where)
    low, high = (0, 0) if group.is_state else (1, LIMITS["axis_size"])
    check_in_range("block_tokens", group.block_tokens, low, high, where)
    check_in_range("window_tokens", group.window_tokens, 0, LIMITS["axis_size"], where)
    if group.block_tokens % group.pages_per_block:
        raise InvalidGeometry(
            "block-not-whole-pages",
            f"Blocks of {group.block_tokens} tokens ({where}) do not divide into {group.pages_per_block} pages.",
            {"block_tokens": group.block_tokens, "pages_per_block": group.pages_per_block},
        )
    deal = group.deal
    check_in_range("context size", deal.size, 1, LIMITS["tp"], where)
    check_in_range("context rank", deal.rank, 0, deal.size - 1, where)
    check_in_range("interleave_tokens", deal.interleave_tokens, 1, LIMITS["axis_size"], where)
    if deal.size > 1 and (group.is_state or group.block_tokens % deal.interleave_tokens):
        raise InvalidGeometry(
            "deal-not-block-aligned",
            f"{where} deals out turns of {deal.interleave_tokens} tokens, "
            f"which do not divide its blocks of {group.block_tokens} tokens.",
            {"interleave_tokens": deal.interleave_tokens, "block_tokens": group.block_tokens},
        )
    # The context-parallel rank follows from the tensor-parallel rank: every reader assumes it.
    expected = tp_rank % deal.size
    if deal.rank != expected:
        raise InvalidGeometry(
            "deal-irregular",
            f"Group {number} of tensor-parallel rank {tp_rank} has context rank {deal.rank} of {deal.size}; "
            f"it must be {expected}.",
            {"rank": deal.rank, "expected": expected},
        )


def _check_member_group(member: Member, group: Group, where: str) -> None:
    for field in member.layout.fields:
        token = field.token_axis
        if group.is_state and token is not None:
            raise InvalidGeometry(
                "state-has-tokens", f"Layer {member.layer!r} is in a state group, but {where} counts tokens."
            )
        if token is not None and token.size != group.page_tokens:
            raise InvalidGeometry(
                "page-tokens-differ",
                f"Field {field.name!r} of layer {member.layer!r} has {token.size} tokens in a page; "
                f"its group has {group.page_tokens}.",
                {"field_tokens": token.size, "page_tokens": group.page_tokens},
            )


def _check_shards(geometry: RankGeometry) -> None:
    """Check that the parts of every field make up the interval that the even rule gives to this rank."""
    checked: set[tuple[Layout, ...]] = set()
    for layer, placed in geometry.placements.items():
        groups = {member.group for _, member in placed}
        if len(groups) > 1:
            raise InvalidGeometry(
                "layer-in-two-groups", f"Layer {layer!r} is in groups {sorted(groups)}.", {"groups": sorted(groups)}
            )
        layouts = tuple(member.layout for _, member in placed)
        if layouts not in checked:
            checked.add(layouts)
            parts: dict[str, list[FieldLayout]] = {}
            for field in (field for layout in layouts for field in layout.fields):
                parts.setdefault(field.name, []).append(field)
            for fields in parts.values():
                _check_parts(layer, fields, geometry.tp_size, geometry.tp_rank)


def _check_parts(layer: str, fields: list[FieldLayout], tp_size: int, tp_rank: int) -> None:
    """Raise unless the parts of a field make up the rank's even share: heads 2..3 of 8 on rank 1 of 4."""
    name = fields[0].name
    held = [axis for field in fields if (axis := field.split_axis) is not None]
    if len(fields) > 1 and len(held) != len(fields):
        raise InvalidGeometry(
            "field-twice", f"Layer {layer!r} has field {name!r} in {len(fields)} places without a split axis."
        )
    if not held:
        return
    where = f"field {name!r} of layer {layer!r}"
    if len({(axis.name, axis.size) for axis in held}) != 1:
        axes = ", ".join(sorted({f"{axis.name} of {axis.size}" for axis in held}))
        raise InvalidGeometry("parts-differ", f"Parts of {where} are split along different axes: {axes}.")
    intervals = sorted((axis.start, axis.stop) for axis in held)
    for one, two in pairwise(intervals):
        if one[1] != two[0]:
            raise InvalidGeometry(
                "parts-overlap" if one[1] > two[0] else "parts-leave-hole",
                f"Parts [{one[0]}, {one[1]}) and [{two[0]}, {two[1]}) of {where} neither meet nor follow each other.",
                {"first": one, "second": two},
            )
    share = (intervals[0][0], intervals[-1][1])
    expected = even_interval(held[0].size, tp_size, tp_rank)
    if share != expected:
        raise InvalidGeometry(
            "shard-irregular",
            f"Rank {tp_rank} of {tp_size} holds [{share[0]}, {share[1]}) of {where}; "
            f"its even share of {held[0].size} parts is [{expected[0]}, {expected[1]}).",
            {"held": share, "expected": expected},
        )


def _check_aliases(geometry: RankGeometry) -> None:
    """Raise if two regions of one group share bytes. Overlap is fine between groups: a page belongs to one of them.

    Regions of a group may lie in one another's gaps, as interleaved rows of one page stride.
    """
    spans: dict[tuple[int, str, int], list[tuple[int, int, int]]] = {}
    for number, region in enumerate(geometry.regions):
        for group in {member.group for member in region.members}:
            memory = spans.setdefault((group, region.memory_kind, region.device), [])
            memory.append((region.base_address, region.stop_address, number))
    for (group, _, _), memory in spans.items():
        for cluster in (each for each in clusters(memory) if len(each) > 1):
            regions = [geometry.regions[number] for _, _, number in cluster]
            stride, origin = regions[0].page_stride_bytes, regions[0].base_address
            rows = sorted(((region.base_address - origin) % stride, region.page_bytes) for region in regions)
            rows.append((rows[0][0] + stride, 0))
            is_disjoint = all(one[0] + one[1] <= two[0] for one, two in pairwise(rows))
            if not is_disjoint or any(region.page_stride_bytes != stride for region in regions):
                numbers = [number for _, _, number in cluster]
                raise InvalidGeometry(
                    "regions-overlap",
                    f"Regions {numbers} of group {group} share memory; a byte must have one place in a group.",
                    {"regions": numbers, "group": group},
                )


def _check_geometry(geometry: RankGeometry) -> None:
    """Raise `InvalidGeometry` with a code and the numbers if the geometry contradicts itself or is absurdly large."""
    where = "the geometry"
    for name in ("groups", "regions", "stage_layers"):
        _check_tuple(name, getattr(geometry, name))
    if geometry.null_block is not None and type(geometry.null_block) is not int:
        raise InvalidGeometry(
            "geometry-malformed", f"null_block is {shown(geometry.null_block)}; it must be an integer or None."
        )
    sizes = ("tp", geometry.tp_size, geometry.tp_rank), ("pp", geometry.pp_size, geometry.pp_rank)
    for what, size, rank in sizes:
        check_in_range(f"{what}_size", size, 1, LIMITS[what], where)
        check_in_range(f"{what}_rank", rank, 0, size - 1, where)
    check_in_range("number of groups", len(geometry.groups), 1, LIMITS["groups"], where)
    check_in_range("number of regions", len(geometry.regions), 1, LIMITS["regions"], where)
    check_in_range("number of members", sum(len(r.members) for r in geometry.regions), 1, LIMITS["members"], where)
    for number, group in enumerate(geometry.groups):
        _check_group(group, number, geometry.tp_rank)
    _check_regions(geometry)
    _check_shards(geometry)
    _check_aliases(geometry)
    _check_stages(geometry)


def _check_regions(geometry: RankGeometry) -> None:
    budget = Budget()
    extents: dict[Layout, int] = {}
    grouped: set[tuple[Layout, int]] = set()
    patterns: set[object] = set()
    for number, region in enumerate(geometry.regions):
        for member in region.members:
            if member.layout not in extents:
                check_layout(member.layout, f"layer {member.layer!r}", budget)
                extents[member.layout] = member.layout.extent_bytes
        _check_region(region, number, len(geometry.groups), extents, patterns, budget)
        for member in region.members:
            if (member.layout, member.group) not in grouped:
                _check_member_group(member, geometry.groups[member.group], f"region {number}")
                grouped.add((member.layout, member.group))


def _check_tuple(name: str, entries: object) -> None:
    if type(entries) is not tuple:
        raise InvalidGeometry("geometry-malformed", f"{name} holds {shown(entries)} where a tuple belongs.")


def _check_stages(geometry: RankGeometry) -> None:
    if geometry.stage_layers and len(geometry.stage_layers) != geometry.pp_size:
        raise InvalidGeometry(
            "stage-layers-count",
            f"stage_layers names {len(geometry.stage_layers)} stages of {geometry.pp_size}.",
            {"stages": len(geometry.stage_layers), "pp_size": geometry.pp_size},
        )
    for layers in geometry.stage_layers:
        _check_tuple("stage_layers", layers)
        for entry in layers:
            _check_tuple("stage_layers", entry.fields)
            if not all(isinstance(name, str) for name in (entry.layer, *entry.fields)):
                raise InvalidGeometry(
                    "geometry-malformed", f"stage_layers has {shown(entry.layer)} and its fields; names are texts."
                )
            last = len(geometry.groups) - 1
            check_in_range(f"group of layer {entry.layer!r}", entry.group, 0, last, "stage_layers")


def _check_equal(where: str, *pairs: tuple[str, str, object, object]) -> None:
    """Raise `GeometryMismatch` for the first of (code, name, local value, peer's value) that differs."""
    for code, what, local, peer in pairs:
        if local != peer:
            raise GeometryMismatch(
                code,
                f"{what} of {where} is {local!r} here and {peer!r} at the peer; both engines must agree on it.",
                {"where": where, "local": local, "peer": peer},
                fault="peer",
            )


def check_groups_match(local: Group, peer: Group, layer: str) -> None:
    """Raise `GeometryMismatch` unless the groups of a layer hold the same kind of blocks."""
    where = f"the group of layer {layer!r}"
    _check_equal(
        where,
        ("group-kind-differs", "The kind", local.kind, peer.kind),
        ("window-differs", "The attention window", local.window_tokens, peer.window_tokens),
    )
    if local.is_state:
        _check_equal(where, ("state-pages-differ", "Pages of a state", local.pages_per_block, peer.pages_per_block))


def check_fields_match(local: FieldLayout, peer: FieldLayout, layer: str) -> None:
    """Raise `GeometryMismatch` unless two layouts show the same logical tensor.

    Strides, offsets, held intervals and the size of the token axis may differ; everything else is the model's.
    """
    where = f"field {local.name!r} of layer {layer!r}"
    names, peer_names = [sorted(axis.name for axis in field.axes) for field in (local, peer)]
    _check_equal(
        where,
        ("element-bytes-differ", "The element size", local.element_bytes, peer.element_bytes),
        ("packing-differs", "The kernel's own order", local.packing, peer.packing),
        ("axes-differ", "The list of axes", names, peer_names),
    )
    for axis in local.axes:
        other = peer.axis(axis.name)
        if other is not None and axis is not local.token_axis:
            size, split = f"The size of axis {axis.name!r}", f"The split of axis {axis.name!r}"
            sizes = "axis-size-differs", size, axis.size, other.size
            _check_equal(where, sizes, ("split-differs", split, axis.split, other.split))


def check_names_match(mine: Placed, theirs: Placed, layer: str) -> None:
    """Raise `GeometryMismatch` (`field-missing`) unless the peer has every field of a layer that this rank has."""
    wanted = {field.name for _, member in mine for field in member.layout.fields}
    offered = {field.name for _, member in theirs for field in member.layout.fields}
    if not wanted <= offered:
        raise GeometryMismatch(
            "field-missing",
            f"Layer {layer!r} needs the fields {sorted(wanted)}, the peer has {sorted(offered)}.",
            {"layer": layer, "local": sorted(wanted), "peer": sorted(offered)},
            fault="peer",
        )
