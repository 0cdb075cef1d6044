"""Parts of streams: both sides mean the same places of the table, and parts together are the whole prompt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_scheduler_state import BlockList, GroupConfig
from kv_scheduler_state.streams.producer import StreamPlaces
from vllm_adapter.worker.transfer.stream_parts import StreamShape


@pytest.mark.parametrize("tokens", [1, 31, 32, 100, 257])
@pytest.mark.parametrize("start", [0, 32])
@pytest.mark.parametrize("window", [0, 20, 64])
def test_parts_together_are_the_whole_prompt(tokens: int, start: int, window: int) -> None:
    shape = StreamShape([(16, window), (32, 0), (0, 0)])
    start = start if start < tokens else 0
    seen: list[int] = []
    for at in range(start, tokens, 32):
        stop = min(at + 32, tokens)
        for part in shape.parts(tokens, at, stop, is_last=stop == tokens):
            seen += range(part.place, part.place + part.length)
    small, large = -(-tokens // 16), -(-tokens // 32)
    first = max(start, tokens - window if window else 0) // 16
    assert sorted(seen) == [*range(first, small), *range(small + start // 32, small + large), small + large]


@given(st.data())
def test_both_sides_mean_the_same_place_of_the_table(data: Any) -> None:
    """The producer puts ids into places that it counts itself; the reader's parts find at each place the block it needs.

    The truth is plain: block number `n` of group `g` has the id 1000 * g + n, and stands for `span` tokens from `n * span` on.
    """
    spans = data.draw(st.lists(st.sampled_from((0, 8, 16, 32, 48)), min_size=1, max_size=4))
    tokens = data.draw(st.integers(1, 400))
    groups = tuple(GroupConfig(block_tokens=span) if span else GroupConfig("state") for span in spans)
    places, shape = StreamPlaces(groups, tokens), StreamShape([(span, 0) for span in spans])
    cuts = sorted({*data.draw(st.lists(st.integers(1, tokens), max_size=5)), tokens})
    table: dict[int, int] = {}
    done = [0] * len(spans)
    for cut in cuts:
        new: list[list[int]] = []
        for group, span in enumerate(spans):
            count = -(-cut // span) if span else 1
            new.append([1000 * group + number for number in range(done[group], count)])
            done[group] = count
        for run in places.fill(new, is_last=cut == tokens):
            table.update({run.first + number: block for number, block in enumerate(run.ids)})
    entry = shape.entry_tokens
    for first in range(0, tokens, entry):
        stop = min(first + entry, tokens)
        parts = shape.parts(tokens, first, stop, is_last=stop == tokens)
        for group, blocks in enumerate(shape.peer_blocks(parts, table, [BlockList(())] * len(spans))):
            span = spans[group]
            numbers = range(first // span, -(-stop // span)) if span else range(int(stop == tokens))
            assert blocks.ids == tuple(1000 * group + number for number in numbers)
