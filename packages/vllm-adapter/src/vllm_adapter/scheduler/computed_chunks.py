"""Chunks of prompts that will be handed over, told to the request machines step by step.

They need the chunks of every such prompt in host-buffer mode, for the copies to the mirror, and else of those alone that a peer
may read while they are computed. Where nothing of either kind runs, a step costs one look here.
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
    """Tells the request machines of every chunk, and knows the prompts of which one was refused.

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
        """Follow the prompt of a producer's request from its arrival, if anybody needs its chunks."""
        if self._has_mirror or is_early:
            self._chunks.watch(request_id, prompt_tokens)

    def follows(self, request_id: str) -> bool:
        """Return whether the chunks of a request are needed."""
        return self._chunks.follows(request_id)

    def tell(self, scheduled: Iterable[ScheduledTokens]) -> None:
        """Tell of what a step computes; `scheduled` is not looked at while no prompt is followed."""
        if self._chunks.is_following:
            for step in scheduled:
                chunk = self._chunks.scheduled(step)
                if chunk is not None and chunk.request_id not in self._refused:
                    self._tell(chunk)

    def _tell(self, chunk: PrefillChunk) -> None:
        # Until the machine has accepted the chunk, the prompt must not be handed over. Nothing is told of it any more, either:
        # blocks of later chunks would take the places of those that are missing.
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
        """Follow a request no longer."""
        self._refused.discard(request_id)
        self._chunks.forget(request_id)
