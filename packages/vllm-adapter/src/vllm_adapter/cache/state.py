"""Pages of state layers: the convolution's last inputs, and then the recurrent state.

The convolution keeps its projections side by side, each with the channels of this rank's heads or groups. The kind of layer
determines which projections these are (the shapes cannot tell). Its rows are the last few inputs: the host keeps the rows of a
channel together ("DS") or the channels of a row ("SD").
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from vllm_adapter.cache.documents import AxisEntry
from vllm_adapter.cache.fields import make_field, unknown_shape, whole_page

if TYPE_CHECKING:
    from vllm_adapter.cache.documents import FieldDocument
    from vllm_adapter.cache.facts import EngineFacts, LayerCache

__all__ = ["state_fields"]


class Projection(NamedTuple):
    """A projection whose inputs the convolution keeps, side by side with others.

    Attributes:
        name: Name of its field.
        held: Heads or groups on this rank.
        total: Heads or groups in the model; with fewer than ranks, neighbouring ranks hold copies of one.
        channels: Channels of a head or group.
    """

    name: str
    held: int
    total: int
    channels: int


def state_fields(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Return the fields of a state page; one whole-page field where the kind of layer is not known.

    Raises:
        AdapterError: `unknown-cache-shape` for a state layer without shapes.
    """
    shapes = cache.state_shapes
    if not shapes:
        raise unknown_shape(cache, "state layers have the shapes of their states")
    projections = None if cache.is_replicated else _projections(facts, cache)
    if projections is None:
        used = sum(prod(shape) * size for shape, size in zip(shapes, cache.state_element_bytes, strict=True))
        packing = f"state:{cache.state_kind}:{shapes}:{cache.state_element_bytes}".replace(" ", "")
        return whole_page(facts, "state", used, packing, is_replicated=cache.is_replicated)
    fields, offset = _convolution(facts, cache, projections) if projections else ([], 0)
    if len(shapes) == 2 or not fields:
        fields.append(_recurrent(facts, shapes[-1], cache.state_element_bytes[-1], offset))
    return fields


def _projections(facts: EngineFacts, cache: LayerCache) -> list[Projection] | None:
    """Return the projections whose inputs the convolution keeps; None for an unknown kind of layer."""
    ranks = tuple(len(shape) for shape in cache.state_shapes)
    channels = max(cache.state_shapes[0])
    if (cache.state_kind, ranks) == ("LINEAR", (3,)):
        return []
    if (cache.state_kind, ranks) == ("SHORT_CONV", (2,)) or (
        (cache.state_kind, ranks) == ("MAMBA1", (2, 2)) and cache.state_shapes[1][0] == channels
    ):
        return [Projection("conv_x", channels, channels * facts.tp, 1)]
    return _grouped_projections(facts, cache, channels) if ranks == (2, 3) else None


def _grouped_projections(facts: EngineFacts, cache: LayerCache, channels: int) -> list[Projection] | None:
    """Return the projections of a layer whose heads share groups.

    Example: 64 heads of 64 channels, one group, 128 states, on 2 ranks. A rank's convolution has 32 * 64 + 2 * 128 = 2304
    channels, so it holds (2304 - 2048) / (2 * 128) = 1 group: the same one as its neighbour, since the model has one.
    """
    heads, head_dim, state = cache.state_shapes[1]
    groups, rest = divmod(channels - heads * head_dim, 2 * state)
    if groups <= 0 or rest:
        return None
    total_heads, total_groups = heads * facts.tp, groups * facts.tp
    if cache.state_kind == "GDN_ATTN":
        return [
            Projection("conv_q", groups, total_groups, state),
            Projection("conv_k", groups, total_groups, state),
            Projection("conv_v", heads, total_heads, head_dim),
        ]
    if cache.state_kind != "MAMBA2":
        return None
    if facts.state_groups % facts.tp:  # vLLM extends the groups by copies where they do not divide by the ranks
        if groups != 1 or facts.state_groups > facts.tp:
            return None
        total_groups = facts.state_groups
    return [
        Projection("conv_x", heads, total_heads, head_dim),
        Projection("conv_b", groups, total_groups, state),
        Projection("conv_c", groups, total_groups, state),
    ]


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
    for name, held, total, width in projections:
        first = facts.tp_rank * total // facts.tp
        axes: list[AxisEntry] = [
            AxisEntry("group", total, first, first + held, width * channel_step, "tp"),
            AxisEntry("channel", width, 0, width, channel_step),
            AxisEntry("row", rows, 0, rows, row_step),
        ]
        fields.append(make_field(name, element_bytes, offset, axes))
        offset += held * width * channel_step
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
