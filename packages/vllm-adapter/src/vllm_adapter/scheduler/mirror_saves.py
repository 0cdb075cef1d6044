"""Copies of computed blocks to the mirror in host memory, as the steps order them (host-buffer mode only)."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_adapter.ports import SchedulerState
    from vllm_adapter.scheduler.prefill_chunks import PrefillChunks, ScheduledTokens
    from vllm_adapter.scheduler.refusals import Refusals

__all__ = ["MirrorSaves"]


@final
class MirrorSaves:
    """Orders a copy of every chunk of a prompt that will be handed over, and knows the prompts whose copy was refused.

    Args:
        chunks: Follows the prompts' blocks; None without a mirror, when every method does nothing.
        state: The request machines.
        refusals: Turns a refusal of the machines into a log line.
    """

    def __init__(self, chunks: PrefillChunks | None, state: SchedulerState, refusals: Refusals) -> None:
        self._chunks = chunks
        self._state = state
        self._refusals = refusals
        self._unsaved: set[str] = set()

    def watch(self, request_id: str, prompt_tokens: int) -> None:
        """Follow the prompt of a producer's request from its arrival."""
        if self._chunks is not None:
            self._chunks.watch(request_id, prompt_tokens)

    def order(self, scheduled: Iterable[ScheduledTokens]) -> None:
        """Order the copies of what a step computes."""
        if self._chunks is not None:
            for step in scheduled:
                self._order_chunk(self._chunks, step)

    def _order_chunk(self, chunks: PrefillChunks, step: ScheduledTokens) -> None:
        chunk = chunks.scheduled(step)
        if chunk is None:
            return
        # Until the machine has accepted the copy, the prompt must not be handed over.
        is_new = step.request_id not in self._unsaved
        self._unsaved.add(step.request_id)
        with self._refusals("copy to the mirror", step.request_id):
            self._state.scheduled(
                chunk.request_id, new_block_ids=chunk.block_ids, is_prompt_complete=chunk.is_prompt_complete
            )
            if is_new:
                self._unsaved.discard(step.request_id)

    def is_unsaved(self, request_id: str) -> bool:
        """Return whether a copy of the request's blocks was refused, so that its prompt must not be handed over."""
        return request_id in self._unsaved

    def forget(self, request_id: str) -> None:
        """Follow a request no longer."""
        self._unsaved.discard(request_id)
        if self._chunks is not None:
            self._chunks.forget(request_id)
