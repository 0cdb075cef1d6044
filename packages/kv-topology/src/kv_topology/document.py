"""The plain form in which geometry travels: a versioned mapping of JSON-safe values.

Schema, version 1 (unknown keys are ignored, so that keys can be added without a new version):

    schema        "kv-topology/geometry"
    version       1
    tp, pp        [size, rank]
    null_block    int or null
    stage_layers  [[layer, ...] per stage], for release 0.1, which reads nothing else; not read here
    stages        [[[layer, group number, [field name, ...]], ...] per stage]
    groups        [{kind, block_tokens, pages_per_block, window_tokens, context: [size, rank, interleave_tokens]}]
    layouts       [[{name, element_bytes, offset_bytes, packing, axes: [[name, size, start, stop, stride, split]]}]]
    regions       [{base_address, page_bytes, page_stride_bytes, page_count, memory_kind, device,
                    members: [[layer, layout number, group number, offset_bytes]]}]

Layers that look alike refer to one layout, which keeps the document of a 64-layer rank at a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from kv_topology.arithmetic import TokenDeal
from kv_topology.errors import InvalidGeometry, demand, shown
from kv_topology.geometry import RankGeometry
from kv_topology.model import Axis, FieldLayout, Group, Layout, Member, Region, StageLayer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DOCUMENT_SCHEMA", "DOCUMENT_VERSION", "from_document", "to_document"]

DOCUMENT_SCHEMA = "kv-topology/geometry"
DOCUMENT_VERSION = 1
_SCALARS = frozenset((int, str, float, bool, type(None)))
MAX_VALUES = 1 << 18
"""Numbers, strings, lists and mappings in a document beyond which it is refused; 8 000 regions take about half."""


def to_document(geometry: RankGeometry) -> dict[str, object]:
    """Return the geometry as a mapping of ints, strings and lists that survives JSON and msgpack."""
    demand("geometry", geometry, RankGeometry)
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
        "stages": [
            [[entry.layer, entry.group, list(entry.fields)] for entry in layers] for layers in geometry.stage_layers
        ],
        "groups": [
            _written(group, _GROUP) | {"context": [group.deal.size, group.deal.rank, group.deal.interleave_tokens]}
            for group in geometry.groups
        ],
        "layouts": [
            [
                _written(field, _FIELD)
                | {"axes": [[a.name, a.size, a.start, a.stop, a.stride_bytes, a.split] for a in field.axes]}
                for field in layout.fields
            ]
            for layout in numbers
        ],
        "regions": [
            _written(region, _REGION)
            | {"members": [[m.layer, numbers[m.layout], m.group, m.offset_bytes] for m in region.members]}
            for region in geometry.regions
        ],
    }


def _written(value: object, keys: Mapping[str, object]) -> dict[str, object]:
    return {key: getattr(value, key) for key in keys}


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


_FIELD = {"name": _text, "element_bytes": _int, "offset_bytes": _int, "packing": _text}
_GROUP = {"kind": _text, "block_tokens": _int, "pages_per_block": _int, "window_tokens": _int}
_REGION = {
    "base_address": _int,
    "page_bytes": _int,
    "page_stride_bytes": _int,
    "page_count": _int,
    "memory_kind": _text,
    "device": _int,
}
"""Keys of the tables by how they are read; each is an attribute of the value."""
_DEFAULTS = {"packing": "", "pages_per_block": 1, "window_tokens": 0, "memory_kind": "DRAM", "device": 0}


def _read(table: Mapping[str, object], path: str, keys: Mapping[str, Callable[[object, str], Any]]) -> dict[str, Any]:
    return {key: read(table.get(key, _DEFAULTS.get(key)), f"{path}.{key}") for key, read in keys.items()}


def _tuple(value: object, path: str, *reads: Callable[[object, str], Any]) -> tuple[Any, ...]:
    """Return a list of as many values as there are readers."""
    items = _items(value, path, len(reads))
    return tuple(read(item, path) for read, item in zip(reads, items, strict=True))


def _field(value: object, path: str) -> FieldLayout:
    table = _table(value, path)
    axes = tuple(
        Axis(*_tuple(axis, f"{path}.axes", _text, _int, _int, _int, _int, _text))
        for axis in _items(table.get("axes"), f"{path}.axes")
    )
    return FieldLayout(axes=axes, **_read(table, path, _FIELD))


def _layout(value: object, path: str) -> Layout:
    return Layout(tuple(_field(field, path) for field in _items(value, path)))


def _group(value: object, path: str) -> Group:
    table = _table(value, path)
    context = _tuple(table.get("context", [1, 0, 1]), f"{path}.context", _int, _int, _int)
    return Group(deal=TokenDeal(*context), **_read(table, path, _GROUP))


def _member(value: object, layouts: Sequence[Layout], path: str) -> Member:
    layer, layout, group, offset = _items(value, path, 4)
    number = _int(layout, path)
    if not 0 <= number < len(layouts):
        raise _bad(path, f"a layout number below {len(layouts)}", number)
    return Member(_text(layer, path), layouts[number], _int(group, path), _int(offset, path))


def _region(value: object, layouts: Sequence[Layout], path: str) -> Region:
    table, members = _table(value, path), f"{path}.members"
    return Region(
        members=tuple(_member(member, layouts, members) for member in _items(table.get("members"), members)),
        **_read(table, path, _REGION),
    )


def _stage_layer(value: object, path: str) -> StageLayer:
    layer, group, fields = _items(value, path, 3)
    names = tuple(_text(name, path) for name in _items(fields, path))
    return StageLayer(_text(layer, path), _int(group, path), names)


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
    tp_size, tp_rank = _tuple(table.get("tp"), "tp", _int, _int)
    pp_size, pp_rank = _tuple(table.get("pp"), "pp", _int, _int)
    layouts, groups, regions = (enumerate(_items(table.get(key), key)) for key in ("layouts", "groups", "regions"))
    null_block = table.get("null_block")
    known = [_layout(fields, f"layouts[{n}]") for n, fields in layouts]
    return RankGeometry(
        tp_size=tp_size,
        tp_rank=tp_rank,
        groups=tuple(_group(group, f"groups[{n}]") for n, group in groups),
        regions=tuple(_region(region, known, f"regions[{n}]") for n, region in regions),
        pp_size=pp_size,
        pp_rank=pp_rank,
        stage_layers=tuple(
            tuple(_stage_layer(entry, "stages") for entry in _items(layers, "stages"))
            for layers in _items(table.get("stages", []), "stages")
        ),
        null_block=None if null_block is None else _int(null_block, "null_block"),
    )
