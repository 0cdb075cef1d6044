"""Blocks that a chunk touches, and prefix hits that are complete before a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from factories import facts

from vllm_adapter.cache.facts import CacheGroup
from vllm_adapter.observe.recorder import Recorder
from vllm_adapter.scheduler.chunks import FollowedPrompt, PrefillChunks, ScheduledTokens, held_tokens, written_blocks

FULL = CacheGroup("attention", 16, 0, 0, ("a",))


class Chunks(SimpleNamespace):
    """The chunks of a prompt, as the request machines take them."""

    def __init__(self, tokens: int) -> None:
        self.taken: list[Any] = []
        engine = facts(groups=(FULL,), is_mirrored=True)
        machines: Any = SimpleNamespace(scheduled=lambda _name, **chunk: self.taken.append(SimpleNamespace(**chunk)))
        self.chunks = PrefillChunks(engine, machines, Recorder(now_s=lambda: 0.0))
        self.chunks.prompts["r"] = FollowedPrompt(tokens)

    def scheduled(self, step: ScheduledTokens) -> Any:
        self.taken.clear()
        self.chunks.take([step])
        return self.taken[0] if self.taken else None


def step(blocks: list[list[int]], start: int, stop: int, *, fresh: bool = False, name: str = "r") -> ScheduledTokens:
    return ScheduledTokens(name, blocks, fresh, start, stop - start)


def test_tokens_of_an_answer_are_no_tokens_of_the_prompt() -> None:
    """A request that starts again after some tokens of its answer computes them in one chunk with its prompt."""
    chunks = Chunks(40)
    chunk = chunks.scheduled(step([[1, 2, 3]], 0, 45, fresh=True))
    assert (chunk.computed_tokens, chunk.is_prompt_complete) == (40, True)


def test_only_prompts_that_will_be_handed_over_are_followed() -> None:
    chunks = Chunks(32)
    assert chunks.scheduled(step([[1]], 0, 16, fresh=True, name="other")) is None


TABLES = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    ("spans", "blocks", "computed", "others", "held"),
    [
        ((16,), [[1, 2, 3]], 32, [(16, [[4, 5, 6]])], 32),
        ((16,), [[1, 2, 4]], 32, [(0, [[1, 2, 3]])], 0),  # the other request is about to fill blocks of the hit
        ((16,), [[1, 2, 3]], 32, [(24, [[1, 2, 5]])], 0),  # it goes on in block 2
        ((16,), [[1, 2, 3]], 32, [(32, [[1, 2, 5]])], 32),
        ((16,), [[1, 2, 3]], 32, [(0, None)], 0),  # its blocks are unknown
        # Null blocks belong to no request, and states do not count.
        ((32, 32, 0), [[1, 2, 3], [0, 7, 8], [9]], 64, [(0, [[4, 5], [0, 6], [9]])], 64),
        ((16, 32), TABLES, 80, [], 64),  # block 9 is written from its middle on
        ((16, 96), TABLES, 80, [], 0),
    ],
)
def test_a_hit_is_complete_before_a_step_that_writes_none_of_its_blocks(
    spans: tuple[int, ...], blocks: list[list[int]], computed: int, others: list[Any], held: int
) -> None:
    assert held_tokens(spans, blocks, computed, lambda: written_blocks(spans, [(computed, blocks), *others])) == held


def test_the_tables_of_a_step_are_read_for_a_hit_alone() -> None:
    assert held_tokens((16,), [[1, 2]], 0, lambda: pytest.fail("no hit")) == 0
