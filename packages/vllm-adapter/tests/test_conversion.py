"""From a staged plan's moves to steps in words: the same bytes in the same places, in as few and as wide moves as possible."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from kv_topology import PageMove, StagedRegion
from vllm_adapter.worker.pages import PageRange, Permutation, conversion_steps


def region(
    number: int = 0, *, group: int = 0, start: int = 0, stop: int, moves: tuple[PageMove, ...] = ()
) -> StagedRegion:
    return StagedRegion(number, group, start, stop, moves)


def dense(shape: tuple[int, ...], axes: list[int], element_bytes: int) -> tuple[int, ...]:
    """Strides of a dense array whose axes lie in memory in the given order, outermost first."""
    strides, step = [0] * len(shape), element_bytes
    for axis in reversed(axes):
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


@st.composite
def regions(draw: Any) -> StagedRegion:
    """A page cut into equal parts, each permuted and put into another part's place."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    element_bytes, start = draw(st.sampled_from([1, 2, 3, 4, 8, 16])), draw(st.integers(0, 40))
    parts = draw(st.permutations(range(draw(st.integers(1, 3)))))
    part_bytes = math.prod(shape) * element_bytes
    axes = list(range(len(shape)))
    moves = tuple(
        PageMove(
            shape,
            element_bytes,
            start + number * part_bytes,
            dense(shape, draw(st.permutations(axes)), element_bytes),
            start + place * part_bytes,
            dense(shape, draw(st.permutations(axes)), element_bytes),
        )
        for number, place in enumerate(parts)
    )
    return region(start=start, stop=start + len(parts) * part_bytes, moves=moves)


def moved(page: np.ndarray[Any, Any], region: StagedRegion) -> np.ndarray[Any, Any]:
    final = page.copy()
    for move in region.moves:
        shape = (*move.shape, move.element_bytes)
        source = as_strided(page[move.source_offset :], shape, (*move.source_strides, 1))
        as_strided(final[move.target_offset :], shape, (*move.target_strides, 1))[...] = source
    return final


def permuted(page: np.ndarray[Any, Any], how: Permutation) -> np.ndarray[Any, Any]:
    final = page.copy()
    stop = how.start_bytes + how.span * how.word_bytes
    words = page[how.start_bytes : stop].reshape(how.span, how.word_bytes)
    target = final[how.start_bytes : stop].reshape(how.span, how.word_bytes)
    for move in how.moves:
        cells = np.indices(move.shape).reshape(len(move.shape), -1)
        source = words[move.source_offset + np.array(move.source_strides) @ cells]
        target[move.target_offset + np.array(move.target_strides) @ cells] = source
    return final


@given(regions(), st.sampled_from([1, 2, 4, 8, 12]))
def test_words_move_as_the_bytes_do(region: StagedRegion, place: int) -> None:
    page = np.random.default_rng(0).integers(0, 256, region.stop + 7, np.uint8)
    (step,) = conversion_steps([(region, np.array([3]))], [PageRange(4096, 4096, 8)])
    for how in (step.permutation(), step.permutation(place)):
        assert how.word_bytes in {1, 2, 4, 8}
        np.testing.assert_array_equal(permuted(page, how), moved(page, region))
    assert place % step.permutation(place).word_bytes == 0


def test_what_stays_together_moves_together() -> None:
    """Tokens before heads into heads before tokens, 16 bit: a head's token is one run of 32 words of 8 bytes."""
    move = PageMove((1, 16, 8, 128), 2, 0, (65536, 4096, 512, 2), 0, (0, 512, 8192, 2))
    (step,) = conversion_steps([(region(stop=65536, moves=(move,)), np.array([1]))], [PageRange(0, 65536, 9)])
    assert step.permutation().word_bytes == 8
    assert [m.shape for m in step.permutation().moves] == [(16, 8, 32)]


def test_layers_that_are_permuted_alike_share_a_step_and_shared_memory_is_permuted_once() -> None:
    swap = (PageMove((1,), 4, 0, (4,), 4, (4,)), PageMove((1,), 4, 4, (4,), 0, (4,)))
    other = (PageMove((1,), 8, 0, (8,), 0, (8,)),)
    ranges = [PageRange(300, 8, 9), PageRange(100, 8, 9), PageRange(200, 8, 9), PageRange(100, 8, 9)]
    staged = [(region(number, stop=8, moves=swap), np.array([1, 2])) for number in (0, 1, 3)]
    staged.append((region(2, stop=8, moves=other), np.array([1, 2])))
    staged.append((region(2, group=1, stop=8, moves=swap), np.array([4])))
    staged.append((region(0, group=2, stop=8, moves=swap), np.array([], np.int64)))
    steps = conversion_steps(staged, ranges)
    assert [[place.address for place in step.regions] for step in steps] == [[100, 300], [200], [200]]
    assert [step.pages.tolist() for step in steps] == [[1, 2], [1, 2], [4]]
