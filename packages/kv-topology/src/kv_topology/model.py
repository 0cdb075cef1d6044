"""Parts of a rank's geometry: axes, fields, layouts, regions and groups, all immutable.

Theory of operation. A *field* is one logical tensor of a layer (key, value, latent, ssm, ...) with named global axes. A
`FieldLayout` says, for one rank, which interval of each axis is held and how far apart neighbours lie inside a page. A
`Layout` is the set of fields that one layer keeps in one page, and is shared by all layers that look alike. A `Region`
is registered memory cut into pages; its members place layers' layouts into the page. A `Group` says how block ids turn
into pages and tokens.

A region is a *view*: groups that share memory (hybrid models) each have members, in one region or in several that
overlap, because a page belongs to one group at a time. Members of the *same* group never overlap; a `RankGeometry` refuses
them. A field may be spread over several members (one region per head, say); together they hold one interval.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple, final

from kv_topology.arithmetic import TokenDeal
from kv_topology.errors import InvalidGeometry, demand

__all__ = [
    "TOKEN_AXIS",
    "Axis",
    "FieldLayout",
    "Group",
    "GroupKind",
    "Layout",
    "Member",
    "MemoryKind",
    "Region",
    "Split",
    "StageLayer",
]

TOKEN_AXIS = "token"  # noqa: S105 - a token of text, not a password
"""Name of the axis that runs along the prompt; its size is the tokens of one page."""

Split = Literal["whole", "tp"]
GroupKind = Literal["attention", "sliding-window", "latent", "state"]
MemoryKind = Literal["DRAM", "VRAM"]


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a field as one rank holds it.

    Attributes:
        name: Kind of part that the axis counts: token, head, channel, ...
        size: Parts in the whole model (for `token`: tokens in one page).
        start: First part held.
        stop: Number after the last part held.
        stride_bytes: Distance of neighbouring parts inside a page.
        split: "tp" when the axis is dealt out over tensor-parallel ranks, "whole" when every rank holds all of it.
    """

    name: str
    size: int
    start: int
    stop: int
    stride_bytes: int
    split: Split = "whole"

    @property
    def count(self) -> int:
        """Number of parts held."""
        return self.stop - self.start


@final
@dataclass(frozen=True, slots=True)
class FieldLayout:
    """A logical tensor inside a page.

    Attributes:
        name: key, value, latent, index, conv_x, ssm, ...
        element_bytes: Size of one element.
        offset_bytes: Where the first held element lies, relative to the member.
        axes: Axes in canonical order (outermost first); the order of memory is in the strides.
        packing: Empty for plainly strided memory; otherwise the name of a kernel's own order of an `interior` axis
            that only equals itself.
    """

    name: str
    element_bytes: int
    offset_bytes: int
    axes: tuple[Axis, ...]
    packing: str = ""

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first held element to the end of the last one."""
        return sum((axis.count - 1) * axis.stride_bytes for axis in self.axes) + self.element_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all held elements."""
        return prod(axis.count for axis in self.axes) * self.element_bytes

    def axis(self, name: str) -> Axis | None:
        """Return the axis of that name, or None."""
        return next((axis for axis in self.axes if axis.name == name), None)

    @property
    def token_axis(self) -> Axis | None:
        """The axis along the prompt; None for states and for blocks in a kernel's own order."""
        return self.axis(TOKEN_AXIS)

    @property
    def split_axis(self) -> Axis | None:
        """The axis that is dealt out over tensor-parallel ranks; None when every rank holds the whole field."""
        return next((axis for axis in self.axes if axis.split == "tp"), None)


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """The fields that one layer keeps in one page. Layers that look alike have equal layouts.

    Layouts are the keys of every cache in the package, so the hash is worked out once.
    """

    fields: tuple[FieldLayout, ...]
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        """Remember the hash; refuse what has none (`wrong-type`, `geometry-malformed`)."""
        demand("fields", self.fields, tuple)
        try:
            object.__setattr__(self, "_hash", hash(self.fields))
        except TypeError:
            raise InvalidGeometry("geometry-malformed", "fields has a list where a tuple belongs.") from None

    def __hash__(self) -> int:
        """Return the hash of the fields."""
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[tuple[FieldLayout, ...]]]:
        """Pickle the fields alone: hashes of strings differ from process to process."""
        return Layout, (self.fields,)

    @property
    def extent_bytes(self) -> int:
        """Bytes from the member's offset to the end of the last field."""
        return max(part.offset_bytes + part.extent_bytes for part in self.fields)


@final
@dataclass(frozen=True, slots=True)
class Member:
    """A layer's place in the pages of a region."""

    layer: str
    layout: Layout
    group: int
    offset_bytes: int = 0


@final
@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory, cut into pages.

    Attributes:
        base_address: Address of page 0.
        page_bytes: Bytes of a page that members may use.
        page_stride_bytes: Distance from one page to the next, at least `page_bytes`.
        page_count: Number of pages.
        memory_kind: Where the memory lives.
        device: Device number for NIXL.
        members: Layers whose data lies in the pages.
    """

    base_address: int
    page_bytes: int
    page_stride_bytes: int
    page_count: int
    members: tuple[Member, ...]
    memory_kind: MemoryKind = "DRAM"
    device: int = 0

    @property
    def stop_address(self) -> int:
        """Address behind the last page."""
        return self.base_address + (self.page_count - 1) * self.page_stride_bytes + self.page_bytes


@final
@dataclass(frozen=True, slots=True)
class Group:
    """How the block ids of one KV-cache group turn into pages and tokens.

    Attributes:
        kind: Content of the blocks; `state` blocks hold whole states and have no tokens.
        block_tokens: Tokens of one scheduler block on one rank (0 for states).
        pages_per_block: Kernel blocks per scheduler block: block b covers pages b*k ... b*k+k-1.
        window_tokens: Attention window, 0 for none.
        deal: How tokens are dealt out under context parallelism.
    """

    kind: GroupKind
    block_tokens: int
    pages_per_block: int = 1
    window_tokens: int = 0
    deal: TokenDeal = field(default_factory=TokenDeal)

    @property
    def page_tokens(self) -> int:
        """Tokens in one page, 0 for states."""
        return self.block_tokens // self.pages_per_block

    @property
    def span_tokens(self) -> int:
        """Tokens of the sequence that one place in a block list stands for, over all context-parallel ranks."""
        return self.block_tokens * self.deal.size

    @property
    def is_state(self) -> bool:
        """Whether blocks are states instead of runs of tokens."""
        return self.kind == "state"


class StageLayer(NamedTuple):
    """A layer of a pipeline stage.

    Attributes:
        layer: Name of the layer.
        group: Its KV-cache group.
        fields: Names of its fields.
    """

    layer: str
    group: int
    fields: tuple[str, ...]
