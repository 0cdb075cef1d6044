"""The numbers from which an engine is built: of its model, of its shards and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from kv_topology._errors import InvalidGeometry

__all__ = ["KV_LAYOUTS", "STATE_KINDS", "EngineSpec", "LayerKind", "ModelSpec", "StateSpec"]

LayerKind = Literal["attention", "sliding", "latent", "mamba2", "mamba1", "gated-delta"]
STATE_KINDS = ("mamba2", "mamba1", "gated-delta")

KV_LAYOUTS = {
    "packed-HND": "a region per layer; cells hold a head's key, then its value (vLLM: LBHNC)",
    "packed-NHD": "the same with tokens outermost (vLLM: LBNHC)",
    "halves-HND": "a region per layer; a page holds its keys, then its values",
    "halves-NHD": "the same with tokens outermost",
    "split-HND": "two regions per layer: keys and values",
    "split-NHD": "the same with tokens outermost",
    "cross-HND": "one region; a page holds all layers (vLLM: BLHNC)",
    "cross-NHD": "the same with tokens outermost (vLLM: BLNHC)",
    "heads-outer": "a region per layer and head (vLLM: LHBNC)",
    "cross-heads": "one region; a page holds, head by head, all layers (vLLM: BHLNC)",
    "keys-by-channel": "per head the keys channel by channel, then the values (vLLM's CPU attention, vec and vec16)",
    "cpu": "vLLM's CPU attention, amx: per head keys, then values, in the kernel's own order",
}
"""Layouts of attention caches by name, with what they are."""

_ALIASES = {
    "LBHNC": "packed-HND",
    "LBNHC": "packed-NHD",
    "BLHNC": "cross-HND",
    "BLNHC": "cross-NHD",
    "LHBNC": "heads-outer",
    "BHLNC": "cross-heads",
}


@final
@dataclass(frozen=True, slots=True)
class StateSpec:
    """Sizes of a recurrent layer; sizes that a kind does not use stay 0.

    Attributes:
        heads: State heads (Mamba-2), channels (Mamba-1) or value heads (gated delta net).
        head_dim: Channels of a head, or the value dimension.
        state_dim: State elements per channel, or the key dimension.
        groups: Groups of B and C, or key heads.
        conv_rows: Inputs that the convolution remembers.
        conv_element_bytes: Bytes of an element of the convolution's state.
        state_element_bytes: Bytes of an element of the recurrent state.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    conv_rows: int = 3
    conv_element_bytes: int = 2
    state_element_bytes: int = 4


@final
@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The numbers of a model that decide its KV cache.

    Attributes:
        kinds: Kind of each layer.
        kv_heads: KV heads.
        head_dim: Elements of a key of one head.
        element_bytes: Bytes of a cached element.
        window_tokens: Window of the `sliding` layers.
        latent_dim: Elements per token of the `latent` layers.
        index_dim: Elements per token of their indexer, 0 for none.
        state: Sizes of the recurrent layers.
    """

    kinds: tuple[LayerKind, ...]
    kv_heads: int = 1
    head_dim: int = 1
    element_bytes: int = 2
    window_tokens: int = 0
    latent_dim: int = 0
    index_dim: int = 0
    state: StateSpec | None = None

    @property
    def group_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds in order of first appearance: one KV-cache group each."""
        return tuple(dict.fromkeys(self.kinds))


@final
@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How one engine shards and lays out the cache.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline stages.
        dcp: Context-parallel size of attention groups.
        block_tokens: Tokens of a scheduler block on one rank.
        kernel_block_tokens: Tokens of a page; 0 for one page per block.
        layout: A name of `KV_LAYOUTS`, or vLLM's name for it.
        block_count: Scheduler blocks per group.
        interleave_tokens: Tokens per turn under context parallelism; 0 for a block.
        conv_order: Order of convolution states.
        base_address: Address of the first region.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    block_tokens: int = 16
    kernel_block_tokens: int = 0
    layout: str = "packed-HND"
    block_count: int = 64
    interleave_tokens: int = 0
    conv_order: Literal["DS", "SD"] = "DS"
    base_address: int = 1 << 32

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.kernel_block_tokens or self.block_tokens

    @property
    def layout_name(self) -> str:
        """The layout's name in `KV_LAYOUTS`."""
        name = _ALIASES.get(self.layout, self.layout)
        if name not in KV_LAYOUTS:
            known = ", ".join((*KV_LAYOUTS, *_ALIASES))
            raise InvalidGeometry(f"Layout {self.layout!r} is not known; known: {known}.", code="bad-page-order")
        return name
