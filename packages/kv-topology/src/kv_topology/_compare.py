"""Refusals of fields and groups of a peer that cannot be paired with ours; each names both values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_topology._errors import GeometryMismatch

if TYPE_CHECKING:
    from kv_topology._model import Axis, FieldLayout, Group, Member

__all__ = ["Placed", "check_fields_match", "check_groups_match", "check_names_match"]


def _differ(code: str, what: str, where: str, local: object, peer: object) -> GeometryMismatch:
    return GeometryMismatch(
        f"{what} of {where} is {local!r} here and {peer!r} at the peer; both engines must agree on it.",
        code=code,
        fault="peer",
        context={"where": where, "local": local, "peer": peer},
    )


def check_groups_match(local: Group, peer: Group, layer: str) -> None:
    """Raise `GeometryMismatch` unless the groups of a layer hold the same kind of blocks."""
    where = f"the group of layer {layer!r}"
    if local.kind != peer.kind:
        raise _differ("group-kind-differs", "The kind", where, local.kind, peer.kind)
    if local.window_tokens != peer.window_tokens:
        raise _differ("window-differs", "The attention window", where, local.window_tokens, peer.window_tokens)
    if local.is_state and local.pages_per_block != peer.pages_per_block:
        raise _differ("state-pages-differ", "Pages of a state", where, local.pages_per_block, peer.pages_per_block)


def check_fields_match(local: FieldLayout, peer: FieldLayout, layer: str) -> None:
    """Raise `GeometryMismatch` unless two layouts show the same logical tensor.

    Strides, offsets, held intervals and the size of the token axis may differ; everything else is the model's.
    """
    where = f"field {local.name!r} of layer {layer!r}"
    if local.element_bytes != peer.element_bytes:
        raise _differ("element-bytes-differ", "The element size", where, local.element_bytes, peer.element_bytes)
    if local.packing != peer.packing:
        raise _differ("packing-differs", "The kernel's own order", where, local.packing, peer.packing)
    names, peer_names = [sorted(axis.name for axis in field.axes) for field in (local, peer)]
    if names != peer_names:
        raise _differ("axes-differ", "The list of axes", where, names, peer_names)
    for axis in local.axes:
        other = peer.axis(axis.name)
        if other is not None and axis is not local.token_axis:
            _check_axes_match(axis, other, where)


def _check_axes_match(axis: Axis, other: Axis, where: str) -> None:
    if axis.size != other.size:
        raise _differ("axis-size-differs", f"The size of axis {axis.name!r}", where, axis.size, other.size)
    if axis.split != other.split:
        raise _differ("split-differs", f"The split of axis {axis.name!r}", where, axis.split, other.split)


Placed = tuple[tuple[int, "Member"], ...]
"""The members of one layer on one side, each with its region number."""


def check_names_match(mine: Placed, theirs: Placed, layer: str) -> None:
    """Raise `GeometryMismatch` (`field-missing`) unless the peer has every field of a layer that this rank has."""
    wanted = {field.name for _, member in mine for field in member.layout.fields}
    offered = {field.name for _, member in theirs for field in member.layout.fields}
    if not wanted <= offered:
        raise GeometryMismatch(
            f"Layer {layer!r} needs the fields {sorted(wanted)}, the peer has {sorted(offered)}.",
            code="field-missing",
            fault="peer",
            context={"layer": layer, "local": sorted(wanted), "peer": sorted(offered)},
        )
