"""Forms of a page: attention by head, one latent vector per token, a recurrent state.

Words of a token are `id ^ pattern`, with a pattern per global place (layer, head or channel). Words of a state are
`fold(ids) ^ pattern`: the state after a token is `FACTOR * before + id`, word by word, so a state that misses a token, has seen
one twice or is torn differs from what it should be.

Example: ids 5, 7 with `FACTOR` 3 fold to 3 * (3 * 0 + 5) + 7 = 22.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from plan import EnginePlan, GroupPlan

HEADS, HEAD_SIZE = 4, 2
FACTOR = 0x9E3779B1
_LATENT = 4
_DIM, _STATE, _ROWS = 2, 2, 3
Array = np.ndarray[Any, Any]

_DRAW = np.random.default_rng(7)
_HEAD_PATTERNS = _DRAW.integers(0, 1 << 32, (16, HEADS, 1, 2 * HEAD_SIZE), dtype=np.uint32)
_LATENT_PATTERNS = _DRAW.integers(0, 1 << 32, (16, 1, _LATENT), dtype=np.uint32)
_STATE_PATTERNS = _DRAW.integers(0, 1 << 32, (16, 128), dtype=np.uint32)


def fold(ids: Sequence[int], start: int = 0) -> int:
    """Return the word that stands for a sequence of ids, of which `start` stands for an earlier part."""
    for token in ids:
        start = (start * FACTOR + token) & 0xFFFFFFFF
    return start


@final
class TokenPages:
    """Pages of tokens: axes (rank, layer, block, head, token, element), and the patterns of a token's words in them.

    Heads of attention are split over the ranks; a latent vector is one head that every rank has.
    """

    def __init__(self, view: Array, patterns: Array, facts: dict[str, Any]) -> None:
        self.view, self.patterns, self._facts = view, patterns, facts

    def write(self, block: int, first: int, ids: Array) -> None:
        """Compute tokens of a block, from its token `first` on, in all layers of the group on all ranks."""
        self.view[:, :, block, :, first : first + len(ids), :] = self.patterns ^ ids[:, None]

    def wrong(self, block: int, first: int, ids: Array) -> int | None:
        """Return None if a block holds these tokens from its token `first` on, else the id in the first wrong word."""
        found = self.view[:, :, block, :, first : first + len(ids), :] ^ self.patterns
        differs = found != ids[:, None]
        return int(found[differs][0]) if differs.any() else None

    def cache(self, rank: int, layer: int) -> dict[str, Any]:
        """Describe a rank's layer, as the host's seam does."""
        view = self.view[rank, layer]
        place = {"address": view.ctypes.data, "shape": view.shape, "stride_bytes": view.strides}
        return {**place, "element_bytes": view.itemsize, **self._facts}


def _attention_pages(raw: Array, engine: EnginePlan, first_layer: int) -> TokenPages:
    share, tokens, layers = HEADS // engine.tp, engine.block_tokens, raw.shape[1]
    words = raw[..., : share * tokens * 2 * HEAD_SIZE]
    if engine.order == "HND":
        view: Array = words.reshape(*raw.shape[:3], share, tokens, 2 * HEAD_SIZE)
    else:
        view = words.reshape(*raw.shape[:3], tokens, share, 2 * HEAD_SIZE).swapaxes(3, 4)
    patterns = _HEAD_PATTERNS[first_layer : first_layer + layers]
    return TokenPages(view, patterns.reshape(layers, engine.tp, share, 1, 2 * HEAD_SIZE).swapaxes(0, 1), {})


def _latent_pages(raw: Array, engine: EnginePlan, first_layer: int) -> TokenPages:
    view: Array = raw[..., : engine.block_tokens * _LATENT].reshape(*raw.shape[:3], 1, engine.block_tokens, _LATENT)
    return TokenPages(view, _LATENT_PATTERNS[first_layer : first_layer + raw.shape[1], None], {"is_latent": True})


@final
class StatePages:
    """Pages of a Mamba-2 layer: the convolution's last inputs and the recurrent state: axes (rank, layer, block, word).

    With fewer groups of B and C than ranks, all ranks hold the same ones.
    """

    def __init__(self, raw: Array, engine: EnginePlan, first_layer: int, groups: int) -> None:
        self._is_channel_first = engine.order == "HND"
        places = np.array([_state_places(engine, groups, rank) for rank in range(engine.tp)])
        self._shapes = _state_shapes(engine, groups)
        self.view: Array = raw[..., : places.shape[1]]
        self.page_bytes = 4 * raw.shape[3]
        layers = range(first_layer, first_layer + raw.shape[1])
        self.patterns: Array = np.stack([_STATE_PATTERNS[layer][places] for layer in layers], axis=1)

    def advance(self, block: int, source: int, ids: Sequence[int]) -> None:
        """Let a state see tokens; it goes from block `source`, 0 for a new state, to `block`."""
        before = self.view[:, :, source] ^ self.patterns if source else np.zeros_like(self.patterns)
        scale, step = np.uint32(pow(FACTOR, len(ids), 1 << 32)), np.uint32(fold(ids))
        self.view[:, :, block] = (before * scale + step) ^ self.patterns

    def differs(self, block: int, ids: Sequence[int]) -> bool:
        """Return whether a block holds another state than that after exactly these tokens."""
        return bool(((self.view[:, :, block] ^ self.patterns) != np.uint32(fold(ids))).any())

    def cache(self, rank: int, layer: int) -> dict[str, Any]:
        blocks = self.view.shape[2]
        conv, ssm = self._shapes
        return {
            "address": self.view[rank, layer].ctypes.data,
            "shape": (blocks, self.page_bytes),
            "stride_bytes": (self.page_bytes, 1),
            "element_bytes": 1,
            "state_shapes": (conv if self._is_channel_first else conv[::-1], ssm),
            "state_element_bytes": (4, 4),
            "state_kind": "MAMBA2",
        }


def _state_shapes(engine: EnginePlan, groups: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return (channels, rows) of the convolution and the shape of the recurrent state on a rank."""
    heads, held = HEADS // engine.tp, max(1, groups // engine.tp)
    return (heads * _DIM + 2 * held * _STATE, _ROWS), (heads, _DIM, _STATE)


def _state_places(engine: EnginePlan, groups: int, rank: int) -> list[int]:
    """Return the global number of every word of a rank's page.

    Example: 1 group on 2 ranks: both ranks have channels 16 and 17 for B, whose 3 rows are the numbers 48 to 53.
    """
    heads, held = HEADS // engine.tp, max(1, groups // engine.tp)
    first_group = rank * groups // engine.tp
    x = range(rank * heads * _DIM, (rank + 1) * heads * _DIM)
    b = [16 + channel for channel in range(first_group * _STATE, (first_group + held) * _STATE)]
    c = [24 + channel for channel in range(first_group * _STATE, (first_group + held) * _STATE)]
    channels = [*x, *b, *c]
    if engine.order == "HND":
        conv = [channel * _ROWS + row for channel in channels for row in range(_ROWS)]
    else:
        conv = [channel * _ROWS + row for row in range(_ROWS) for channel in channels]
    first = 96 + rank * heads * _DIM * _STATE
    return conv + list(range(first, first + heads * _DIM * _STATE))


def words_of(group: GroupPlan, engine: EnginePlan, state_groups: int) -> int:
    """Return the words of a page that hold data."""
    if group.kind == "latent":
        return engine.block_tokens * _LATENT
    if group.kind == "state":
        return len(_state_places(engine, state_groups, 0))
    return HEADS // engine.tp * engine.block_tokens * 2 * HEAD_SIZE


def pages_of(
    raw: Array, group: GroupPlan, engine: EnginePlan, first_layer: int, state_groups: int
) -> TokenPages | StatePages:
    """Return the pages of a group; `raw` are its layers' words by (rank, layer, block)."""
    if group.kind == "state":
        return StatePages(raw, engine, first_layer, state_groups)
    return (_latent_pages if group.kind == "latent" else _attention_pages)(raw, engine, first_layer)
