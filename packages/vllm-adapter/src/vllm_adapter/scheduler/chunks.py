"""Chunks of the prompts that will be handed over, and prefix hits that are complete before a step.

In host-buffer mode the request machines need the chunks of every such prompt, for the copies to the mirror; otherwise only those
of prompts that a peer may read while they are computed. If there are no such prompts, a step costs one check here.

Streams need the blocks that a step adds; copies to a mirror need the blocks that it touches. A chunk touches the blocks of the
tokens that it computes, including a block that the previous chunk left partly filled, which is not among the blocks that the
engine adds in this step. A request's first chunk also covers all tokens before it: the blocks of a prefix hit may have been
computed for requests that were not handed over.

Example: blocks of 16 tokens, a prompt of 40, steps of 24 and 16 tokens. The first step touches blocks 0 and 1, the second tokens
24 to 39, which lie in blocks 1 and 2.

For states only the last one matters, once the prompt is complete. The blocks before it hold states of earlier boundaries. The
host takes them away and gives them to other requests while the prompt continues, so a copy of such a block could overwrite
data that is being read into it.

A stream may show a prefix hit at once if its pages are complete before the step. The host indexes a block by its content as
soon as the step that computes it is scheduled, so a hit may name blocks that another request of the same step is about to fill.
Therefore, once a prompt that will be streamed has a hit, and only then, the blocks that the step writes are collected from the
block tables of all its requests.

Example: blocks of 16 tokens. A step computes tokens 16 to 47 of a request with the blocks 4, 5 and 6, so it writes 5 and 6. A
hit on blocks 4 and 5 is not complete before the step; a hit on block 4 is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, final

from vllm_adapter.observe.recorder import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import SchedulerState

__all__ = ["FollowedPrompt", "PrefillChunks", "ScheduledTokens", "held_tokens", "written_blocks"]

_NULL_BLOCK = 0
"""Block id that stands for no block."""


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Tokens that a step computes for one request.

    Attributes:
        request_id: The request.
        block_ids: Blocks per transferable group: all of them if `is_fresh`, else those that are new.
        is_fresh: Whether the request starts, or starts again after a preemption.
        computed_tokens: Tokens that are already computed.
        new_tokens: Tokens that this step computes.
        held_tokens: Tokens of a prefix hit that this step does not compute for any request, see `held_tokens`.
    """

    request_id: str
    block_ids: Sequence[Sequence[int]]
    is_fresh: bool
    computed_tokens: int
    new_tokens: int
    held_tokens: int = 0


@dataclass(slots=True)
class FollowedPrompt:
    """A prompt whose chunks are needed.

    Attributes:
        tokens: Its length.
        blocks: Its blocks so far, per transferable group.
        is_complete: Whether all its chunks have been scheduled.
        is_refused: Whether a chunk was refused, so that the prompt must not be handed over.
    """

    tokens: int
    blocks: list[list[int]] = field(default_factory=list[list[int]])
    is_complete: bool = False
    is_refused: bool = False


@final
class PrefillChunks:
    """Follows the prompts that will be handed over, and passes their chunks to the request machines.

    Args:
        facts: This engine.
        state: The request machines.
        recorder: Rate-limits log lines about exceptions of the machines.

    Attributes:
        prompts: The prompts that are followed, by request.
        span_tokens: Tokens that a block of each group stands for, 0 for a group of states. Under context parallelism a block's
            count is multiplied: blocks of 16 tokens that are dealt out to two ranks stand for 32 tokens of the prompt.
    """

    def __init__(self, facts: EngineFacts, state: SchedulerState, recorder: Recorder) -> None:
        self.span_tokens = tuple(
            0 if group.kind == "state" else group.block_tokens * size
            for group, size in zip(facts.groups, facts.context_sizes, strict=True)
        )
        self._scratch_blocks = [group.scratch_blocks for group in facts.groups]
        self._state = state
        self._recorder = recorder
        self._has_mirror = facts.is_mirrored
        self.prompts: dict[str, FollowedPrompt] = {}

    def take(self, scheduled: Iterable[ScheduledTokens]) -> None:
        """Pass on the chunks that a step computes."""
        for step in scheduled:
            prompt = self.prompts.get(step.request_id)
            if prompt is not None:
                self._take_chunk(prompt, step)

    def _take_chunk(self, prompt: FollowedPrompt, step: ScheduledTokens) -> None:
        if step.is_fresh:
            prompt.blocks, prompt.is_complete = [list(ids) for ids in step.block_ids], False
        else:
            for known, added in zip(prompt.blocks, step.block_ids, strict=False):
                known.extend(added)
        if prompt.is_complete:
            return
        stop = step.computed_tokens + step.new_tokens
        prompt.is_complete = stop >= prompt.tokens
        if prompt.is_refused:
            return
        # The prompt must not be handed over until the machine has accepted the chunk. After a refusal no further chunk is passed
        # on either: the blocks of later chunks would take the places of the missing ones.
        prompt.is_refused = True
        event = "copy to the mirror" if self._has_mirror else "chunk of a streamed prompt"
        with Guard(self._recorder, event, step.request_id):
            start = 0 if step.is_fresh else step.computed_tokens
            self._state.scheduled(
                step.request_id,
                new_block_ids=step.block_ids,
                touched_block_ids=self._touched_blocks(prompt, start, stop) if self._has_mirror else None,
                is_prompt_complete=prompt.is_complete,
                computed_tokens=min(stop, prompt.tokens),
                held_tokens=min(step.held_tokens, prompt.tokens),
            )
            prompt.is_refused = False

    def _touched_blocks(self, prompt: FollowedPrompt, start: int, stop: int) -> list[Sequence[int]]:
        """Return the blocks per group with the tokens [start, stop); of a state, the last one once the prompt is complete."""
        return [
            ids[start // span : -(-stop // span)]
            if span
            else _running_state(ids, scratch)
            if prompt.is_complete
            else ()
            for ids, span, scratch in zip(prompt.blocks, self.span_tokens, self._scratch_blocks, strict=True)
        ]


def _running_state(ids: Sequence[int], scratch_blocks: int) -> Sequence[int]:
    """Return the block with the state of the last token, which precedes the scratch blocks."""
    last = max(0, len(ids) - 1 - scratch_blocks)
    return ids[last : last + 1]


def held_tokens(
    span_tokens: Sequence[int],
    block_ids: Sequence[Sequence[int]],
    computed_tokens: int,
    written: Callable[[], set[int] | None],
) -> int:
    """Return the tokens of a prefix hit, in whole blocks of all groups; 0 if the step writes any of them, or in case of doubt.

    Args:
        span_tokens: Tokens that a block of each transferable group stands for; 0 for a group of states, which is not checked.
        block_ids: The request's blocks per group.
        computed_tokens: Tokens that the hit covers.
        written: Returns the blocks that the step writes, see `written_blocks`; called for a hit only.
    """
    whole_tokens = computed_tokens - computed_tokens % lcm(*filter(None, span_tokens))
    if not whole_tokens:
        return 0
    changing = written()
    hits = {
        block for ids, span in zip(block_ids, span_tokens, strict=True) if span for block in ids[: whole_tokens // span]
    }
    return whole_tokens if changing is not None and not (hits - {_NULL_BLOCK}) & changing else 0


def written_blocks(
    span_tokens: Sequence[int], scheduled: Iterable[tuple[int, Sequence[Sequence[int]] | None]]
) -> set[int] | None:
    """Return the blocks that a step writes; None if a block table is not known.

    Args:
        span_tokens: As for `held_tokens`.
        scheduled: (computed tokens, whole block table per group, None if the host does not tell) of all requests of the step.
    """
    written: set[int] = set()
    for computed_tokens, table in scheduled:
        if table is None:
            return None
        for ids, span in zip(table, span_tokens, strict=True):
            if span:
                written.update(ids[computed_tokens // span :])
    return written
