"""Ring of the latest hand-overs' moments in one process, for `vllm-adapter trace`.

A moment is a reading of this process's own monotonic clock, in seconds; no clock of another process is ever written here, and
nothing of a prompt but its length. At rest nothing is done and nothing grows; a moment costs one append to a ring, and moments
are put together when somebody asks.

Stages of a prompt that is handed over: `arrived`, `scheduled`, `answered`, `freed` in the scheduler's process, `granted`, `read`,
`freed` in a rank's. Of one that is taken over: `arrived`, `allocated`, `ordered`, `reported`, `scheduled`, `first_token` in the
scheduler's process; `ordered`, `told`, `planned`, `posted`, `started`, `whole` (streamed prompts only), `data`, `fence`, `ended`,
`taken`, `completed` in a rank's.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal, cast, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.observe.answers import HandOverEntry
    from vllm_adapter.steps import ReadEnd, ReadTimes

__all__ = ["MOST_HAND_OVERS", "HandOverLog", "short_id"]

MOST_HAND_OVERS = 128
"""Hand-overs that a process remembers at least, at about 1 KiB each."""
_MOST_STAGES = 6
"""Moments that one hand-over takes in the ring; what a rank stamps of a read is one of them."""
_KEPT_CHARACTERS = 80
_Role = Literal["producer", "consumer"]
_Event = tuple[str, str, float, "_Role | None", "Mapping[str, object] | None", "tuple[ReadTimes, float, float] | None"]
"""(request id, stage, seconds, role at the beginning, facts, a rank's times of its read)."""


def short_id(request_id: str) -> str:
    """Return an id that costs bounded memory: its two ends, since clients choose the first and vLLM appends to the last."""
    if len(request_id) <= 2 * _KEPT_CHARACTERS:
        return request_id
    return f"{request_id[:_KEPT_CHARACTERS]}...{request_id[-_KEPT_CHARACTERS:]}"


@final
class HandOverLog:
    """Remembers when the latest hand-overs reached their stages in this process; any thread.

    Args:
        most: Hand-overs that are remembered at least; the oldest moments are forgotten first.
    """

    def __init__(self, most: int = MOST_HAND_OVERS) -> None:
        self._events: deque[_Event] = deque(maxlen=most * _MOST_STAGES)

    def mark(
        self,
        request_id: str,
        stage: str,
        at_s: float,
        facts: Mapping[str, object] | None = None,
        *,
        role: _Role | None = None,
    ) -> None:
        """Note a moment of a hand-over; of a repeated stage the first one counts, and unknown requests are ignored.

        Args:
            request_id: This engine's request.
            stage: The stage that it has reached.
            at_s: Seconds of this process's clock.
            facts: Plain values to report along.
            role: With the first moment of a hand-over: whether it is handed over from here or to here. An earlier one of the same
                id is forgotten.
        """
        self._events.append((short_id(request_id), stage, at_s, role, facts, None))

    def read_ended(self, end: ReadEnd, taken_s: float, completed_s: float) -> None:
        """Remember one rank's read.

        Args:
            end: Its end, after completion.
            taken_s: Time at which the engine's thread took it up.
            completed_s: Time at which its pages were in order.
        """
        order, times = end.order, end.times
        facts = {
            "peer_engine_id": order.ticket.peer.engine_id,
            "peer_request_id": short_id(order.ticket.peer_request_id),
            "tokens": order.tokens,
            "bytes": times.bytes_moved,
            "code": end.code,
        }
        if times.early_bytes is not None:
            facts["early_bytes"] = times.early_bytes
        stamps = times, end.ended_s, taken_s
        self._events.append((short_id(order.request_id), "completed", completed_s, "consumer", facts, stamps))

    def describe(self) -> list[HandOverEntry]:
        """Return what is remembered, oldest first, as plain values."""
        found: dict[str, HandOverEntry] = {}
        for request_id, stage, at_s, role, facts, stamps in self._events.copy():
            if role is not None:
                found.pop(request_id, None)  # so that an id which is used again stands where it began anew
                moments: dict[str, float | None] = {} if stamps is None else _moments(*stamps)
                found[request_id] = {"request_id": request_id, "role": role, "moments": moments}
            entry = found.get(request_id)
            if entry is not None:
                entry["moments"].setdefault(stage, at_s)
                entry.update(cast("HandOverEntry", facts or {}))
        return list(found.values())


def _moments(times: ReadTimes, ended_s: float, taken_s: float) -> dict[str, float | None]:
    """Return a rank's moments of a read by stage, without those that it did not reach."""
    stages = {"ordered": times.ordered_s, "told": times.told_s, "planned": times.planned_s, "posted": times.posted_s}
    if times.posted_s is not None and times.data_s is not None:
        stages["started"] = times.posted_s + times.queue_s
        stages["whole"] = times.whole_s
        stages["data"] = times.data_s
        stages["fence"] = times.data_s + times.fence_s
    stages |= {"ended": ended_s, "taken": taken_s}
    return {stage: moment for stage, moment in stages.items() if moment is not None}
