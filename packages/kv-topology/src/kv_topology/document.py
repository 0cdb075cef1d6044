"""The plain form in which geometry travels: a versioned mapping of JSON-safe values.

Schema, version 1 (unknown keys are ignored, so that keys can be added without a new version):

    schema        "kv-topology/geometry"
    version       1
    tp, pp        [size, rank]
    null_block    int or null
    stage_layers  [[layer, ...] per stage]
    stages        [[[layer, group number, [field name, ...]], ...] per stage], from 0.2 on; repeats `stage_layers`
    groups        [{kind, block_tokens, pages_per_block, window_tokens, context: [size, rank, interleave_tokens]}]
    layouts       [[{name, element_bytes, offset_bytes, packing, axes: [[name, size, start, stop, stride, split]]}]]
    regions       [{base_address, page_bytes, page_stride_bytes, page_count, memory_kind, device,
                    members: [[layer, layout number, group number, offset_bytes]]}]

Layers that look alike refer to one layout, which keeps the document of a 64-layer rank at a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from kv_topology.arithmetic import TokenDeal
from kv_topology.errors import InvalidGeometry, shown
from kv_topology.geometry import RankGeometry
from kv_topology.model import Axis, FieldLayout, Group, Layout, Member, Region, StageLayer

if TYPE_CHECKING:
    from kv_topology.model import GroupKind, MemoryKind, Split

__all__ = ["DOCUMENT_SCHEMA", "DOCUMENT_VERSION", "from_document", "to_document"]

DOCUMENT_SCHEMA = "kv-topology/geometry"
DOCUMENT_VERSION = 1
_SCALARS = frozenset((int, str, float, bool, type(None)))
MAX_VALUES = 1 << 18
"""Numbers, strings, lists and mappings in a document beyond which it is refused; 8 000 regions take about half."""


def to_document(geometry: RankGeometry) -> dict[str, object]:
    """Return the geometry as a mapping of ints, strings and lists that survives JSON and msgpack."""
    numbers: dict[Layout, int] = {}
    for region in geometry.regions:
        for member in region.members:
            numbers.setdefault(member.layout, len(numbers))
    return {
        "schema": DOCUMENT_SCHEMA,
        "version": DOCUMENT_VERSION,
        "tp": [geometry.tp_size, geometry.tp_rank],
        "pp": [geometry.pp_size, geometry.pp_rank],
        "null_block": geometry.null_block,
        "stage_layers": [[entry.layer for entry in layers] for layers in geometry.stage_layers],
        "stages": [_stage_document(layers) for layers in geometry.stage_layers],
        "groups": [_group_document(group) for group in geometry.groups],
        "layouts": [[_field_document(field) for field in layout.fields] for layout in numbers],
        "regions": [_region_document(region, numbers) for region in geometry.regions],
    }


def _stage_document(layers: Sequence[StageLayer]) -> list[list[object]]:
    return [[entry.layer, entry.group, list(entry.fields)] for entry in layers]


def _group_document(group: Group) -> dict[str, object]:
    return {
        "kind": group.kind,
        "block_tokens": group.block_tokens,
        "pages_per_block": group.pages_per_block,
        "window_tokens": group.window_tokens,
        "context": [group.deal.size, group.deal.rank, group.deal.interleave_tokens],
    }


def _region_document(region: Region, numbers: Mapping[Layout, int]) -> dict[str, object]:
    return {
        "base_address": region.base_address,
        "page_bytes": region.page_bytes,
        "page_stride_bytes": region.page_stride_bytes,
        "page_count": region.page_count,
        "memory_kind": region.memory_kind,
        "device": region.device,
        "members": [[m.layer, numbers[m.layout], m.group, m.offset_bytes] for m in region.members],
    }


def _field_document(field: FieldLayout) -> dict[str, object]:
    return {
        "name": field.name,
        "element_bytes": field.element_bytes,
        "offset_bytes": field.offset_bytes,
        "packing": field.packing,
        "axes": [[a.name, a.size, a.start, a.stop, a.stride_bytes, a.split] for a in field.axes],
    }


def _bad(path: str, expected: str, value: object) -> InvalidGeometry:
    return InvalidGeometry(
        "document-malformed",
        f"Geometry document: {path} must be {expected}, not {shown(value)}.",
        {"path": path, "expected": expected},
    )


def _check_size(document: Mapping[str, object]) -> None:
    """Raise `document-too-large` if there are more values than any rank needs; looks at no more than that many."""
    count = 0
    open_values: list[Collection[object]] = [document.values()]
    while open_values:
        inside = open_values.pop()
        count += len(inside)
        if count > MAX_VALUES:
            raise InvalidGeometry(
                "document-too-large", f"The geometry document has more than {MAX_VALUES} values.", {"limit": MAX_VALUES}
            )
        for item in inside:
            if type(item) in _SCALARS:
                continue
            if isinstance(item, Mapping):
                open_values.append(cast("Mapping[str, object]", item).values())
            elif isinstance(item, (list, tuple)):
                open_values.append(cast("Sequence[object]", item))


def _int(value: object, path: str) -> int:
    if type(value) is not int or not -(1 << 64) <= value <= 1 << 64:
        raise _bad(path, "an integer of at most 64 bits", value)
    return value


def _text(value: object, path: str) -> str:
    if not isinstance(value, str) or len(value) > 1024:
        raise _bad(path, "a string of at most 1024 characters", value)
    return value


def _items(value: object, path: str, count: int | None = None) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise _bad(path, "a list", value)
    items = cast("Sequence[object]", value)
    if count is not None and len(items) != count:
        raise _bad(path, f"a list of {count} items", items)
    return items


def _table(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise _bad(path, "a mapping", value)
    return cast("Mapping[str, object]", value)


def _axis(value: object, path: str) -> Axis:
    name, size, start, stop, stride, split = _items(value, path, 6)
    return Axis(
        _text(name, path),
        _int(size, path),
        _int(start, path),
        _int(stop, path),
        _int(stride, path),
        cast("Split", _text(split, path)),
    )


def _field(value: object, path: str) -> FieldLayout:
    table = _table(value, path)
    return FieldLayout(
        _text(table.get("name"), f"{path}.name"),
        _int(table.get("element_bytes"), f"{path}.element_bytes"),
        _int(table.get("offset_bytes"), f"{path}.offset_bytes"),
        tuple(_axis(axis, f"{path}.axes") for axis in _items(table.get("axes"), f"{path}.axes")),
        _text(table.get("packing", ""), f"{path}.packing"),
    )


def _group(value: object, path: str) -> Group:
    table = _table(value, path)
    size, rank, interleave = _items(table.get("context", [1, 0, 1]), f"{path}.context", 3)
    return Group(
        cast("GroupKind", _text(table.get("kind"), f"{path}.kind")),
        _int(table.get("block_tokens"), f"{path}.block_tokens"),
        _int(table.get("pages_per_block", 1), f"{path}.pages_per_block"),
        _int(table.get("window_tokens", 0), f"{path}.window_tokens"),
        TokenDeal(_int(size, path), _int(rank, path), _int(interleave, path)),
    )


def _member(value: object, layouts: Sequence[Layout], path: str) -> Member:
    layer, layout, group, offset = _items(value, path, 4)
    number = _int(layout, path)
    if not 0 <= number < len(layouts):
        raise _bad(path, f"a layout number below {len(layouts)}", number)
    return Member(_text(layer, path), layouts[number], _int(group, path), _int(offset, path))


def _region(value: object, layouts: Sequence[Layout], path: str) -> Region:
    table = _table(value, path)
    members = _items(table.get("members"), f"{path}.members")
    return Region(
        _int(table.get("base_address"), f"{path}.base_address"),
        _int(table.get("page_bytes"), f"{path}.page_bytes"),
        _int(table.get("page_stride_bytes"), f"{path}.page_stride_bytes"),
        _int(table.get("page_count"), f"{path}.page_count"),
        tuple(_member(member, layouts, f"{path}.members") for member in members),
        cast("MemoryKind", _text(table.get("memory_kind", "DRAM"), f"{path}.memory_kind")),
        _int(table.get("device", 0), f"{path}.device"),
    )


def _stages(table: Mapping[str, object]) -> tuple[tuple[StageLayer, ...], ...]:
    """Return the layers by stage: with groups and fields from 0.2 on, by name alone from 0.1."""
    if table.get("stages"):
        stages = _items(table.get("stages"), "stages")
        return tuple(tuple(_stage_layer(entry) for entry in _items(layers, "stages")) for layers in stages)
    names = _items(table.get("stage_layers", []), "stage_layers")
    return tuple(
        tuple(StageLayer(_text(layer, "stage_layers")) for layer in _items(layers, "stage_layers")) for layers in names
    )


def _stage_layer(value: object) -> StageLayer:
    layer, group, fields = _items(value, "stages", 3)
    return StageLayer(
        _text(layer, "stages"),
        None if group is None else _int(group, "stages"),
        tuple(_text(name, "stages") for name in _items(fields, "stages")),
    )


def from_document(document: Mapping[str, object]) -> RankGeometry:
    """Return the geometry that a document describes, fully validated.

    Args:
        document: Mapping of the schema above, possibly sent by a peer.

    Raises:
        InvalidGeometry: `document-malformed`, `document-version`, `document-too-large`, or any code of a geometry that
            contradicts itself.
    """
    table = _table(document, "document")
    schema, version = table.get("schema"), table.get("version")
    if schema != DOCUMENT_SCHEMA or type(version) is not int or version != DOCUMENT_VERSION:
        raise InvalidGeometry(
            "document-version",
            f"Geometry document is {shown(schema)} version {shown(version)}; "
            f"this is {DOCUMENT_SCHEMA!r} {DOCUMENT_VERSION}.",
            {"theirs": shown(version), "ours": DOCUMENT_VERSION},
        )
    _check_size(table)
    tp_size, tp_rank = _items(table.get("tp"), "tp", 2)
    pp_size, pp_rank = _items(table.get("pp"), "pp", 2)
    null_block = table.get("null_block")
    layouts = [
        Layout(tuple(_field(field, f"layouts[{n}]") for field in _items(fields, f"layouts[{n}]")))
        for n, fields in enumerate(_items(table.get("layouts"), "layouts"))
    ]
    regions = enumerate(_items(table.get("regions"), "regions"))
    return RankGeometry(
        tp_size=_int(tp_size, "tp"),
        tp_rank=_int(tp_rank, "tp"),
        groups=tuple(_group(g, f"groups[{n}]") for n, g in enumerate(_items(table.get("groups"), "groups"))),
        regions=tuple(_region(region, layouts, f"regions[{n}]") for n, region in regions),
        pp_size=_int(pp_size, "pp"),
        pp_rank=_int(pp_rank, "pp"),
        stage_layers=_stages(table),
        null_block=None if null_block is None else _int(null_block, "null_block"),
    )
