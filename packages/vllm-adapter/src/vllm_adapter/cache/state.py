"""Pages of state layers: the convolution's last inputs, and then the recurrent state.

The convolution keeps its projections side by side, each with the channels of this rank's heads or groups; which ones they
are depends on the kind of layer (and cannot be told from the shapes). Its rows are the last few inputs: the host keeps the
rows of a channel together ("DS") or the channels of a row ("SD").
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from vllm_adapter.cache.fields import make_field, unknown_shape, whole_page
from vllm_adapter.ports.topology import AxisEntry

if TYPE_CHECKING:
    from vllm_adapter.cache.facts import EngineFacts, LayerCache
    from vllm_adapter.ports.topology import FieldDocument

__all__ = ["state_fields"]

Projection = tuple[str, int, int]
"""Name, parts that this rank holds, channels per part."""


def state_fields(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Return the fields of a state page; one whole-page field where the kind of layer is not known.

    Raises:
        AdapterError: `unknown-cache-shape` for a state layer without shapes.
    """
    shapes = cache.state_shapes
    if not shapes:
        raise unknown_shape(cache, "state layers have the shapes of their states")
    projections = None if cache.is_replicated else _projections(cache)
    if projections is None:
        used = sum(prod(shape) * size for shape, size in zip(shapes, cache.state_element_bytes, strict=True))
        packing = f"state:{cache.state_kind}:{shapes}:{cache.state_element_bytes}".replace(" ", "")
        return whole_page(facts, "state", used, packing, is_replicated=cache.is_replicated)
    fields, offset = _convolution(facts, cache, projections) if projections else ([], 0)
    if len(shapes) == 2 or not fields:
        fields.append(_recurrent(facts, shapes[-1], cache.state_element_bytes[-1], offset))
    return fields


def _projections(cache: LayerCache) -> list[Projection] | None:
    """Return the projections whose inputs the convolution keeps, None for a kind of layer that is not known."""
    ranks = tuple(len(shape) for shape in cache.state_shapes)
    channels = max(cache.state_shapes[0])
    known: list[Projection] | None = None
    if (cache.state_kind, ranks) == ("LINEAR", (3,)):
        known = []
    elif (cache.state_kind, ranks) == ("SHORT_CONV", (2,)) or (
        (cache.state_kind, ranks) == ("MAMBA1", (2, 2)) and cache.state_shapes[1][0] == channels
    ):
        known = [("conv_x", channels, 1)]
    elif ranks == (2, 3):
        heads, head_dim, state = cache.state_shapes[1]
        groups, rest = divmod(channels - heads * head_dim, 2 * state)
        if groups > 0 and not rest and cache.state_kind == "MAMBA2":
            known = [("conv_x", heads, head_dim), ("conv_b", groups, state), ("conv_c", groups, state)]
        elif groups > 0 and not rest and cache.state_kind == "GDN_ATTN":
            known = [("conv_q", groups, state), ("conv_k", groups, state), ("conv_v", heads, head_dim)]
    return known


def _convolution(
    facts: EngineFacts, cache: LayerCache, projections: list[Projection]
) -> tuple[list[FieldDocument], int]:
    """Return the fields of the convolution, and the bytes that they take."""
    shape, element_bytes = cache.state_shapes[0], cache.state_element_bytes[0]
    channels, rows = max(shape), min(shape)
    is_channel_first = shape[0] == channels
    channel_step, row_step = (
        (rows * element_bytes, element_bytes) if is_channel_first else (element_bytes, channels * element_bytes)
    )
    fields: list[FieldDocument] = []
    offset = 0
    for name, parts, width in projections:
        first = facts.tp_rank * parts
        axes: list[AxisEntry] = [
            AxisEntry("group", parts * facts.tp, first, first + parts, width * channel_step, "tp"),
            AxisEntry("channel", width, 0, width, channel_step),
            AxisEntry("row", rows, 0, rows, row_step),
        ]
        fields.append(make_field(name, element_bytes, offset, axes))
        offset += parts * width * channel_step
    return fields, channels * rows * element_bytes


def _recurrent(facts: EngineFacts, shape: tuple[int, ...], element_bytes: int, offset: int) -> FieldDocument:
    heads, *inner = shape
    step = element_bytes
    axes: list[AxisEntry] = []
    for number, length in reversed(list(enumerate(inner))):
        name = "state" if number == len(inner) - 1 else "channel"
        axes.insert(0, AxisEntry(name, length, 0, length, step))
        step *= length
    first = facts.tp_rank * heads
    axes.insert(0, AxisEntry("head", heads * facts.tp, first, first + heads, step, "tp"))
    return make_field("ssm", element_bytes, offset, axes)
