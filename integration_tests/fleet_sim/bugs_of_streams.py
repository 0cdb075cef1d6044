"""Planted bugs of prompts that are read while they are computed: stale pages come in, or a slot loses its owner."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from kv_scheduler_state import SchedulerState
from kv_scheduler_state._fences import FencePool
from kv_scheduler_state._stream_producer import StreamProducers
from vllm_adapter.worker.streams import ChunkMarks, RankStreams
from vllm_adapter.worker.transfer.stream_records import StreamShape
from vllm_adapter.worker.transfer.streams import StreamCoordinator

__all__ = ["STREAM_BUGS"]


def _before_event(stack: ExitStack) -> None:
    """A chunk is shown when it was given to the device, not when the device has finished it."""
    stack.enter_context(patch.object(ChunkMarks, "then", lambda _self, action: action()))


def _generation_kept(stack: ExitStack) -> None:
    """A prompt that starts again keeps its generation."""
    known: dict[tuple[int, int], int] = {}
    take = FencePool.take

    def taken(pool: FencePool) -> tuple[int, int] | None:
        fence = take(pool)
        if fence is not None:
            known[id(pool), fence[0]] = fence[1]
        return fence

    stack.enter_context(patch.object(FencePool, "take", taken))
    stack.enter_context(patch.object(FencePool, "renew", lambda pool, slot: (slot, known[id(pool), slot])))


def _state_early(stack: ExitStack) -> None:
    """States are read with the parts before the last one, and not with that."""
    parts = StreamShape.parts

    def early(shape: StreamShape, tokens: int, first_token: int, stop_token: int, *, is_last: bool) -> Any:
        return parts(shape, tokens, first_token, stop_token, is_last=not is_last or not first_token)

    stack.enter_context(patch.object(StreamShape, "parts", early))


def _no_fence(stack: ExitStack) -> None:
    """A read counts as soon as all of it is here, whatever the fence word says."""

    def unread(coordinator: Any, following: Any) -> None:
        if following.watch is not None:
            following.watch.end()
        coordinator._readers.fence_found(following.name, following.stream.read.order.ticket.fence[1])

    stack.enter_context(patch.object(StreamCoordinator, "_read_fence", unread))


def _late_void(stack: ExitStack) -> None:
    """Words move after the forward pass, which may have written into the blocks by then."""
    before, given = RankStreams.before_forward, RankStreams.chunks_given

    def without(plan: Any) -> Any:
        return plan._replace(streams=plan.streams._replace(voids=()))

    def only(plan: Any) -> Any:
        return plan._replace(streams=plan.streams._replace(opens=(), chunks=()))

    def late(streams: RankStreams, plan: Any, mirror: Any = None) -> None:
        before(streams, only(plan), mirror)
        given(streams, plan, mirror)

    def early(streams: RankStreams, plan: Any, mirror: Any = None) -> None:
        before(streams, without(plan), mirror)

    stack.enter_context(patch.object(RankStreams, "before_forward", early))
    stack.enter_context(patch.object(RankStreams, "chunks_given", late))


def _slot_early(stack: ExitStack) -> None:
    """The slot of a prompt that was given up is free before its word has moved."""
    end = StreamProducers.end

    def ended(producers: StreamProducers, request_id: str, row: Any, *, ends: bool) -> None:
        record = producers._streams[request_id].record
        end(producers, request_id, row, ends=ends)
        if ends and record.fence is not None:
            producers.fences.give_back(record.fence[0])
            record.fence = None

    stack.enter_context(patch.object(StreamProducers, "end", ended))


def _no_way(stack: ExitStack) -> None:
    """Two engines whose blocks are leased to each other both wait."""
    stack.enter_context(patch.object(SchedulerState, "give_way", lambda _self, *, now_s: ""))  # noqa: ARG005


STREAM_BUGS = {
    "stream-progress-before-event": _before_event,
    "stream-generation-kept": _generation_kept,
    "stream-state-early": _state_early,
    "stream-no-final-fence": _no_fence,
    "stream-void-after-forward": _late_void,
    "stream-slot-early": _slot_early,
    "reads-never-give-way": _no_way,
}
"""Bugs that seeds of streams find."""
