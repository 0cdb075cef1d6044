"""Reports of a consumer's worker about its streams: which go to the engine, and which only to the scheduler half.

The *engine* counts one report of each worker as received, and lets a request run once it has all of them. So a worker whose
fence held tells the engine at once, and never again for this request. A worker whose stream broke tells the *scheduler half*
alone, which may order another stream, or the plain read of the final ticket, into the same blocks. A worker that is already done
takes part in neither, because its data counts.

Worked example. Worker 0 is done and worker 1 breaks: the engine has one report of two. The final ticket comes: worker 1 reads
alone, its report is the second. Or nothing comes, and the stream is to be stopped: worker 1 reports the request as received
and failed, worker 0 reports nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from kv_scheduler_state._plan import StreamOrder, StreamPlan

__all__ = ["EndReport", "StreamEnds"]


class EndReport(NamedTuple):
    """Reports of a step: for the engine, and for the scheduler half (request, whether the fence held)."""

    received: tuple[str, ...]
    failed: tuple[str, ...]
    ends: tuple[tuple[str, bool], ...]


@final
class StreamEnds:
    """Tracks the outcome of each stream on one worker."""

    __slots__ = ("_ends", "_failed", "_received", "_states")

    def __init__(self) -> None:
        # State of each stream: reading, torn, done, or stopping. A stopping stream is reported to the engine however it ends.
        self._states: dict[str, str] = {}
        self._received: list[str] = []
        self._failed: list[str] = []
        self._ends: list[tuple[str, bool]] = []

    def apply(self, plan: StreamPlan) -> tuple[tuple[StreamOrder, ...], tuple[str, ...]]:
        """Take in a plan; return the streams to watch and the streams to cancel."""
        for request_id in plan.ends:
            self._states.pop(request_id, None)
        watches: list[StreamOrder] = []
        for order in plan.watches:
            request_id = order.read.request_id
            if self._states.get(request_id) == "done":
                self._ends.append((request_id, True))
            else:
                self._states[request_id] = "reading"
                watches.append(order)
        cancels = tuple([request_id for request_id in plan.stops if self._stop(request_id)])
        return tuple(watches), cancels

    def takes_read(self, request_id: str) -> bool:
        """Whether this worker must perform and report the current order: a reported read or notification, or a failure.

        It must not if its stream of the request is done, because it has then reported already. Call this once per such order.
        """
        return self._states.pop(request_id, "") != "done"

    def ended(self, request_id: str, *, is_done: bool) -> None:
        """Record the end of a request's stream on this worker, whose memory is quiet; `is_done` if its fence held."""
        was_stopped = self._states.get(request_id) == "stopping"
        if is_done or was_stopped:
            self._received.append(request_id)
        if was_stopped:
            self._failed.append(request_id)
            del self._states[request_id]
            return
        self._states[request_id] = "done" if is_done else "torn"
        self._ends.append((request_id, is_done))

    def take_report(self) -> EndReport:
        """Return the reports since the last call."""
        report = EndReport(tuple(self._received), tuple(self._failed), tuple(self._ends))
        self._received, self._failed, self._ends = [], [], []
        return report

    def _stop(self, request_id: str) -> bool:
        """Note that a stream is given up; return whether its reading must be cancelled."""
        state = self._states.get(request_id)
        if state == "reading":
            self._states[request_id] = "stopping"
            return True
        if state == "torn":
            self._received.append(request_id)
            self._failed.append(request_id)
        self._states.pop(request_id, None)
        return False
