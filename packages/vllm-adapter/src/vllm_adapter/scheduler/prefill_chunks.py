"""Blocks that a step computes for the prompts that will be handed over.

Streams need the blocks that a step adds; copies to a mirror need the blocks that it touches. A chunk touches the blocks of the
tokens that it computes, including a block that the previous chunk left partly filled, which is not among the blocks that the
engine adds in this step. A request's first chunk also covers all tokens before it: the blocks of a prefix hit may have been
computed for requests that were not handed over.

Example: blocks of 16 tokens, a prompt of 40, steps of 24 and 16 tokens. The first step touches blocks 0 and 1, the second tokens
24 to 39, which lie in blocks 1 and 2.

For states only the last one matters, once the prompt is complete. The blocks before it hold states of earlier boundaries. The
host takes them away and gives them to other requests while the prompt continues, so a copy of such a block could overwrite
data that is being read into it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cache.facts import CacheGroup

__all__ = ["PrefillChunk", "PrefillChunks", "ScheduledTokens"]


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Tokens that a step computes for one request.

    Attributes:
        request_id: The request.
        block_ids: Blocks per transferable group: all of them if `is_fresh`, else those that are new.
        is_fresh: Whether the request starts, or starts again after a preemption.
        computed_tokens: Tokens that are already computed.
        new_tokens: Tokens that this step computes.
        held_tokens: Tokens of a prefix hit that this step does not compute for any request, see `PrefixHits`.
    """

    request_id: str
    block_ids: Sequence[Sequence[int]]
    is_fresh: bool
    computed_tokens: int
    new_tokens: int
    held_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A step's part of a prompt.

    Attributes:
        request_id: The request.
        block_ids: Blocks per group that hold the tokens of the step.
        new_block_ids: Blocks per group that the request gains in this step: all its blocks, if it starts or starts again.
        is_prompt_complete: Whether this step completes the prompt.
        computed_tokens: Prompt tokens that are computed after the step, including those of a prefix hit.
        held_tokens: Prompt tokens that were computed before the step.
    """

    request_id: str
    block_ids: tuple[tuple[int, ...], ...]
    new_block_ids: tuple[tuple[int, ...], ...]
    is_prompt_complete: bool
    computed_tokens: int
    held_tokens: int = 0


@dataclass(slots=True)
class _Prompt:
    tokens: int
    blocks: list[list[int]] = field(default_factory=list[list[int]])
    is_complete: bool = False


@final
class PrefillChunks:
    """Follows the block lists of prompts that will be handed over.

    Args:
        groups: The transferable groups.
        context_sizes: Context-parallel size of each group, by which a block's token count is multiplied: blocks of 16 tokens
            that are dealt out to two ranks stand for 32 tokens of the prompt.
    """

    def __init__(self, groups: Sequence[CacheGroup], context_sizes: Sequence[int]) -> None:
        self._span_tokens = tuple(
            0 if group.kind == "state" else group.block_tokens * size
            for group, size in zip(groups, context_sizes, strict=True)
        )
        self._scratch_blocks = [group.scratch_blocks for group in groups]
        self._prompts: dict[str, _Prompt] = {}

    def watch(self, request_id: str, prompt_tokens: int) -> None:
        """Follow a prompt from its arrival."""
        self._prompts[request_id] = _Prompt(prompt_tokens)

    def forget(self, request_id: str) -> None:
        """Stop following a request."""
        self._prompts.pop(request_id, None)

    @property
    def span_tokens(self) -> tuple[int, ...]:
        """Tokens that a block of each group stands for; 0 for a group of states."""
        return self._span_tokens

    @property
    def is_following(self) -> bool:
        """Whether any prompt is followed."""
        return bool(self._prompts)

    def follows(self, request_id: str) -> bool:
        """Return whether a prompt is followed."""
        return request_id in self._prompts

    def scheduled(self, step: ScheduledTokens) -> PrefillChunk | None:
        """Return the request's chunk in this step; None if the request is not followed or its prompt is complete."""
        prompt = self._prompts.get(step.request_id)
        if prompt is None:
            return None
        if step.is_fresh:
            prompt.blocks, prompt.is_complete = [list(ids) for ids in step.block_ids], False
        else:
            for known, added in zip(prompt.blocks, step.block_ids, strict=False):
                known.extend(added)
        if prompt.is_complete:
            return None
        stop = step.computed_tokens + step.new_tokens
        prompt.is_complete = stop >= prompt.tokens
        start = 0 if step.is_fresh else step.computed_tokens
        blocks = tuple(
            _touched(ids, span, start, stop) if span else _running_state(ids, scratch) if prompt.is_complete else ()
            for ids, span, scratch in zip(prompt.blocks, self._span_tokens, self._scratch_blocks, strict=True)
        )
        new_blocks = tuple(map(tuple, step.block_ids))
        computed, held = min(stop, prompt.tokens), min(step.held_tokens, prompt.tokens)
        return PrefillChunk(step.request_id, blocks, new_blocks, prompt.is_complete, computed, held)


def _touched(ids: Sequence[int], span_tokens: int, start: int, stop: int) -> tuple[int, ...]:
    """Return the blocks of tokens [start, stop)."""
    return tuple(ids[start // span_tokens : -(-stop // span_tokens)])


def _running_state(ids: Sequence[int], scratch_blocks: int) -> tuple[int, ...]:
    """Return the block with the state of the last token, which precedes the scratch blocks."""
    last = max(0, len(ids) - 1 - scratch_blocks)
    return tuple(ids[last : last + 1])
