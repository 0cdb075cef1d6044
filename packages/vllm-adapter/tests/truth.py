"""Contents of recorded caches, stated by the families of models and not by the adapter: the other side of the byte oracle.

Everything is worked out from the recorded specs: what a head, a latent vector or a projection is in the whole model (from the
record of one rank) and which of them a rank of a larger engine has (evenly, shared when there are too few).
"""

from __future__ import annotations

from math import prod
from typing import Any

from recorded import families, is_state, spec_of

from kv_topology import Axis, FieldLayout, Group, Layout, Member, RankGeometry, Region
from kv_topology.tools.engine import LayerKind, StateSpec, state_layout


def share(parts: int, tp: int, rank: int) -> tuple[int, int]:
    """Return the interval of heads that vLLM gives to a rank: an even deal, one shared head when there are too few."""
    start = rank * parts // tp
    return start, max(start + 1, (rank + 1) * parts // tp)


def rank_geometry(name: str, tp: int, tp_rank: int, address: int) -> RankGeometry:
    """Return the geometry that a recorded rank really has."""
    family, whole = families()[name], families()[name]["tp"]["1"]
    rank = family["tp"][str(tp)]
    regions: list[Region] = []
    groups: list[Group] = []
    for number, group in enumerate(rank["groups"]):
        has_states = is_state(group)
        tensors = {layer: rank["tensors"][layer] for layer in group["layers"] if layer in rank["tensors"]}
        pages = 1 if has_states else max(t["shape"][0] for t in tensors.values()) // rank["blocks"]
        tokens = 0 if has_states else group["block_tokens"]
        groups.append(Group("state" if has_states else "attention", tokens, pages, group.get("window_tokens", 0)))
        for layer, tensor in tensors.items():
            size = tensor["element_bytes"]
            stride = tensor["stride"][0] * size
            for offset, layout in _places(
                family, tensor, _spec(rank, layer), _spec(whole, layer), (tp, tp_rank), tokens // pages
            ):
                place = address + tensor["offset_bytes"] + offset
                member = Member(layer, layout, number)
                regions.append(Region(place, min(layout.extent_bytes, stride), stride, tensor["shape"][0], (member,)))
    return RankGeometry(tp, tp_rank, tuple(groups), tuple(regions), null_block=0)


def _spec(rank: dict[str, Any], layer: str) -> dict[str, Any]:
    found = spec_of(rank, layer)
    assert found is not None
    return found


def _places(
    family: dict[str, Any],
    tensor: dict[str, Any],
    spec: dict[str, Any],
    whole: dict[str, Any],
    rank: tuple[int, int],
    page_tokens: int,
) -> list[tuple[int, Layout]]:
    """Return (offset, layout) of the parts of a layer's tensor: one, or one per head where heads lie apart."""
    size = tensor["element_bytes"]
    if spec["class"] == "MambaSpec":
        return [(0, _state(family, spec, whole, rank))]
    _, slots, tokens, content = tensor["shape"]
    _, head_step, token_step, _ = (step * size for step in tensor["stride"])
    is_apart = head_step * (slots - 1) >= tensor["stride"][0] * size or head_step > tokens * content * size
    is_indexer = spec.get("cache_role") == "INDEXER"
    if "MLA" in spec["class"] and tokens == page_tokens and not is_indexer:
        axes = (Axis("token", tokens, 0, tokens, token_step), Axis("channel", content, 0, content, size))
        return [(0, Layout((FieldLayout("latent", size, 0, axes),)))]
    if "MLA" in spec["class"] or is_state(spec):
        # `indexer_k_quant_and_cache`: the values of all tokens of a page (tiled on ROCm), then a scale for each.
        name = "index" if is_indexer else "page"
        return [(0, _opaque(prod(tensor["shape"][1:]) * size, rank if is_state(spec) else None, name))]
    if spec["has_planes"]:
        part = tokens * content * size
        if is_apart:
            return [(slot * head_step, _opaque(part, rank, f"slot_{slot}")) for slot in range(slots)]
        return [(0, _opaque(slots * part, rank))]
    if family["backend"] == "CPU_ATTN":
        inside = (Axis("inside", tokens * content, 0, tokens * content, size),)
        return [(0, _heads(whole, rank, slots, 0, head_step, inside, size))]
    inner = (Axis("token", tokens, 0, tokens, token_step), Axis("content", content, 0, content, size))
    if is_apart:
        return [
            (slot * head_step, _heads(whole, rank, slots, slot, head_step, inner, size, 1)) for slot in range(slots)
        ]
    return [(0, _heads(whole, rank, slots, 0, head_step, inner, size))]


def _heads(
    whole: dict[str, Any],
    rank: tuple[int, int],
    slots: int,
    first: int,
    head_step: int,
    inner: tuple[Axis, ...],
    size: int,
    count: int = 0,
) -> Layout:
    """Return a page of heads: of the model's, those that an even deal gives to the rank."""
    start, stop = share(whole["kv_heads"], *rank)
    assert stop - start == slots
    axis = Axis("head", whole["kv_heads"], start + first, start + first + (count or slots), head_step, "tp")
    return Layout((FieldLayout("cell", size, 0, (axis, *inner)),))


def _opaque(length: int, rank: tuple[int, int] | None, name: str = "page") -> Layout:
    """Return a page whose inside only equal engines understand: a rank's own, or everybody's."""
    axes: tuple[Axis, ...] = (Axis("inside", length, 0, length, 1),)
    if rank is not None:
        axes = (Axis("shard", rank[0], rank[1], rank[1] + 1, length, "tp"), *axes)
    return Layout((FieldLayout(name, 1, 0, axes),))


def _state(family: dict[str, Any], spec: dict[str, Any], whole: dict[str, Any], rank: tuple[int, int]) -> Layout:
    """Return a state page by the kind of layer, with the projections of the whole model dealt out to the rank."""
    shapes, sizes = whole["state_shapes"], whole["state_element_bytes"]
    used = sum(
        prod(shape) * size for shape, size in zip(spec["state_shapes"], spec["state_element_bytes"], strict=True)
    )
    if spec["is_replicated"]:
        return _opaque(used, None)
    kind = spec["mamba_type"]
    if kind == "LINEAR":
        heads, one, two = shapes[0]
        start, stop = share(heads, *rank)
        inner = one * two * sizes[0]
        axes = (Axis("head", heads, start, stop, inner, "tp"), Axis("inside", inner, 0, inner, 1))
        return Layout((FieldLayout("ssm", 1, 0, axes),))
    conv = shapes[0] if family["conv_order"] == "DS" else shapes[0][::-1]

    def layout(kind: LayerKind, heads: int, head_dim: int, state_dim: int, groups: int = 1) -> Layout:
        spec = StateSpec(heads, head_dim, state_dim, groups, conv[1], sizes[0], sizes[-1])
        return state_layout(kind, spec, *rank, family["conv_order"])

    if kind == "SHORT_CONV":
        return Layout(layout("mamba1", conv[0], 1, 1).fields[:1])
    if len(shapes) != 2:
        return _opaque(used, rank)
    if kind == "MAMBA1":
        return layout("mamba1", conv[0], 1, shapes[1][1])
    heads, head_dim, state = shapes[1]
    groups = (conv[0] - heads * head_dim) // (2 * state)
    if kind == "MAMBA2":
        return layout("mamba2", heads, head_dim, state, groups)
    return layout("gated-delta", heads, head_dim, state, groups)
