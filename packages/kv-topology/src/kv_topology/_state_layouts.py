"""Layouts of recurrent states: Mamba-2, Mamba-1 and gated delta nets.

A state page holds the convolution's last inputs and then the recurrent state. In the order that transfers need ("DS",
channel before row) each projection of the convolution is contiguous; the other order ("SD") only changes strides.
Projections that belong to groups are shared when there are more ranks than groups, like KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from kv_topology._errors import InvalidGeometry
from kv_topology._model import Axis, FieldLayout, Layout
from kv_topology._shards import even_interval

__all__ = ["ConvOrder", "StateShape", "gated_delta_layout", "mamba1_layout", "mamba2_layout"]

ConvOrder = Literal["DS", "SD"]


@final
@dataclass(frozen=True, slots=True)
class StateShape:
    """Numbers that all state families need of the rank and the element types.

    Attributes:
        conv_rows: Inputs that the convolution remembers: kernel size - 1.
        conv_element_bytes: Bytes of an element of the convolution's state.
        state_element_bytes: Bytes of an element of the recurrent state.
        tp_size: Tensor-parallel ranks.
        tp_rank: This rank.
        order: Order of the convolution's state.
    """

    conv_rows: int
    conv_element_bytes: int = 2
    state_element_bytes: int = 4
    tp_size: int = 1
    tp_rank: int = 0
    order: ConvOrder = "DS"

    def share(self, parts: int) -> tuple[int, int]:
        """Return the interval of an axis of `parts` that the rank holds."""
        return even_interval(parts, self.tp_size, self.tp_rank)


def _conv_fields(projections: list[tuple[str, int, int]], shape: StateShape) -> tuple[list[FieldLayout], int]:
    """Return the fields of (name, groups, channels per group) projections laid side by side, and their bytes."""
    if shape.order not in {"DS", "SD"}:
        raise InvalidGeometry(f"Convolution order is {shape.order!r}; known: DS, SD.", code="bad-page-order")
    widths: list[int] = []
    for _, parts, channels in projections:
        start, stop = shape.share(parts)
        widths.append((stop - start) * channels)
    element = shape.conv_element_bytes
    if shape.order == "DS":
        channel_stride, row_stride = shape.conv_rows * element, element
    else:
        channel_stride, row_stride = element, sum(widths) * element
    fields: list[FieldLayout] = []
    done = 0
    for (name, parts, channels), width in zip(projections, widths, strict=True):
        start, stop = shape.share(parts)
        axes = (
            Axis("group", parts, start, stop, channels * channel_stride, "tp"),
            Axis("channel", channels, 0, channels, channel_stride),
            Axis("row", shape.conv_rows, 0, shape.conv_rows, row_stride),
        )
        fields.append(FieldLayout(name, element, done * channel_stride, axes))
        done += width
    return fields, done * shape.conv_rows * element


def _state_field(parts: int, inner: tuple[tuple[str, int], ...], offset: int, shape: StateShape) -> FieldLayout:
    """Return the recurrent state: `parts` split over ranks, then whole inner axes, densely."""
    start, stop = shape.share(parts)
    stride = shape.state_element_bytes
    axes: list[Axis] = []
    for name, size in reversed(inner):
        axes.insert(0, Axis(name, size, 0, size, stride))
        stride *= size
    axes.insert(0, Axis("head", parts, start, stop, stride, "tp"))
    return FieldLayout("ssm", shape.state_element_bytes, offset, tuple(axes))


def mamba2_layout(shape: StateShape, *, heads: int, head_dim: int, groups: int, state_dim: int) -> Layout:
    """Return a Mamba-2 state page: conv inputs of x, B and C, then the state (heads, head_dim, state_dim).

    Args:
        shape: Rank and element types.
        heads: State heads of the whole model; the x projection has heads * head_dim channels.
        head_dim: Channels of a head.
        groups: Groups of B and C, shared by ranks when there are more ranks than groups.
        state_dim: State elements per channel.
    """
    fields, conv_bytes = _conv_fields(
        [("conv_x", heads, head_dim), ("conv_b", groups, state_dim), ("conv_c", groups, state_dim)], shape
    )
    inner = (("channel", head_dim), ("state", state_dim))
    return Layout((*fields, _state_field(heads, inner, _aligned(conv_bytes, shape), shape)))


def mamba1_layout(shape: StateShape, *, channels: int, state_dim: int) -> Layout:
    """Return a Mamba-1 state page: conv inputs of x, then the state (channels, state_dim)."""
    fields, conv_bytes = _conv_fields([("conv_x", channels, 1)], shape)
    return Layout((*fields, _state_field(channels, (("state", state_dim),), _aligned(conv_bytes, shape), shape)))


def gated_delta_layout(shape: StateShape, *, key_heads: int, key_dim: int, value_heads: int, value_dim: int) -> Layout:
    """Return a gated-delta-net state page: conv inputs of q, k, v, then the state (value_heads, value_dim, key_dim)."""
    fields, conv_bytes = _conv_fields(
        [("conv_q", key_heads, key_dim), ("conv_k", key_heads, key_dim), ("conv_v", value_heads, value_dim)], shape
    )
    inner = (("value", value_dim), ("key", key_dim))
    return Layout((*fields, _state_field(value_heads, inner, _aligned(conv_bytes, shape), shape)))


def _aligned(conv_bytes: int, shape: StateShape) -> int:
    """Return where the recurrent state begins: right after the convolution, which must suit its element type."""
    if conv_bytes % shape.state_element_bytes:
        raise InvalidGeometry(
            f"The convolution's state takes {conv_bytes} bytes, which does not align the recurrent state's "
            f"{shape.state_element_bytes}-byte elements.",
            code="state-misaligned",
            context={"conv_bytes": conv_bytes, "element_bytes": shape.state_element_bytes},
        )
    return conv_bytes
