"""Chunks of prompts that will be handed over, passed to the request machines step by step.

In host-buffer mode the machines need the chunks of every such prompt, for the copies to the mirror; otherwise only those of
prompts that a peer may read while they are computed. If there are no such prompts, a step costs one check here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_adapter.ports import SchedulerState
    from vllm_adapter.scheduler.hook_guards import HookGuards
    from vllm_adapter.scheduler.prefill_chunks import PrefillChunk, PrefillChunks, ScheduledTokens

__all__ = ["ComputedChunks"]


@final
class ComputedChunks:
    """Passes every chunk to the request machines, and remembers the prompts of which a chunk was refused.

    Args:
        chunks: Follows the prompts' blocks.
        state: The request machines.
        guards: Turns an exception of the machines into a log line.
        has_mirror: Whether all chunks are copied to a mirror in host memory.
    """

    def __init__(self, chunks: PrefillChunks, state: SchedulerState, guards: HookGuards, *, has_mirror: bool) -> None:
        self._chunks = chunks
        self._state = state
        self._guards = guards
        self._has_mirror = has_mirror
        self._refused: set[str] = set()

    def watch(self, request_id: str, prompt_tokens: int, *, is_early: bool) -> None:
        """Follow the prompt of a producer's request from its arrival, if its chunks are needed."""
        if self._has_mirror or is_early:
            self._chunks.watch(request_id, prompt_tokens)

    def follows(self, request_id: str) -> bool:
        """Return whether the chunks of a request are needed."""
        return self._chunks.follows(request_id)

    def tell(self, scheduled: Iterable[ScheduledTokens]) -> None:
        """Pass on the chunks that a step computes; `scheduled` is not iterated while no prompt is followed."""
        if self._chunks.is_following:
            for step in scheduled:
                chunk = self._chunks.scheduled(step)
                if chunk is not None and chunk.request_id not in self._refused:
                    self._tell(chunk)

    def _tell(self, chunk: PrefillChunk) -> None:
        # The prompt must not be handed over until the machine has accepted the chunk. After a refusal no further chunk is passed
        # on either: the blocks of later chunks would take the places of the missing ones.
        self._refused.add(chunk.request_id)
        event = "copy to the mirror" if self._has_mirror else "chunk of a streamed prompt"
        with self._guards(event, chunk.request_id):
            self._state.scheduled(
                chunk.request_id,
                new_block_ids=chunk.new_block_ids,
                touched_block_ids=chunk.block_ids if self._has_mirror else None,
                is_prompt_complete=chunk.is_prompt_complete,
                computed_tokens=chunk.computed_tokens,
                held_tokens=chunk.held_tokens,
            )
            self._refused.discard(chunk.request_id)

    def was_refused(self, request_id: str) -> bool:
        """Return whether a chunk of the request was refused, so that its prompt must not be handed over."""
        return request_id in self._refused

    def forget(self, request_id: str) -> None:
        """Stop following a request."""
        self._refused.discard(request_id)
        self._chunks.forget(request_id)
