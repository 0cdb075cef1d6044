"""Ring of the latest hand-overs' moments in one process, for `vllm-adapter trace`.

A moment is a reading of this process's own monotonic clock, in seconds; no clock of another process is ever written here, and
nothing of a prompt but its length. A process keeps the last `MOST_HAND_OVERS`; at rest nothing is done and nothing grows.

Stages of a prompt that is handed over: `arrived`, `scheduled`, `answered`, `freed` in the scheduler's process, `granted`, `read`,
`freed` in a rank's. Of one that is taken over: `arrived`, `allocated`, `ordered`, `reported`, `scheduled`, `first_token` in the
scheduler's process; `ordered`, `told`, `planned`, `posted`, `started`, `data`, `fence`, `ended`, `taken`, `completed` in a
rank's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from vllm_adapter.steps import ReadEnd

__all__ = ["MOST_HAND_OVERS", "HandOverLog", "short_id"]

MOST_HAND_OVERS = 128
"""Hand-overs that a process remembers, at about 1 KiB each."""
_KEPT_CHARACTERS = 80


def short_id(request_id: str) -> str:
    """Return an id that costs bounded memory: its two ends, since clients choose the first and vLLM appends to the last."""
    if len(request_id) <= 2 * _KEPT_CHARACTERS:
        return request_id
    return f"{request_id[:_KEPT_CHARACTERS]}...{request_id[-_KEPT_CHARACTERS:]}"


@final
@dataclass(slots=True)
class _HandOver:
    role: Literal["producer", "consumer"]
    facts: dict[str, object]
    moments: dict[str, float] = field(default_factory=dict[str, float])


@final
class HandOverLog:
    """Remembers when the latest hand-overs reached their stages in this process; any thread.

    Args:
        most: Hand-overs that are remembered; the oldest is forgotten first.
    """

    def __init__(self, most: int = MOST_HAND_OVERS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _HandOver] = OrderedDict()

    def begin(
        self, request_id: str, role: Literal["producer", "consumer"], moments: dict[str, float], **facts: object
    ) -> None:
        """Remember a hand-over from its first moments here on; one of the same id is forgotten.

        Args:
            request_id: This engine's request.
            role: Whether it is handed over from here or to here.
            moments: Seconds of this process's clock by stage.
            facts: Plain values to tell along.
        """
        key = short_id(request_id)
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = _HandOver(role, facts, moments)
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)

    def mark(self, request_id: str, stage: str, at_s: float, **facts: object) -> None:
        """Note a further moment of a hand-over; of a repeated stage the first one counts, and unknown requests are ignored."""
        entry = self._entries.get(short_id(request_id))
        if entry is not None:
            entry.moments.setdefault(stage, at_s)
            entry.facts.update(facts)

    def read_ended(self, end: ReadEnd, taken_s: float, completed_s: float) -> None:
        """Remember one rank's read.

        Args:
            end: Its end, after completion.
            taken_s: Time at which the engine's thread took it up.
            completed_s: Time at which its pages were in order.
        """
        order, times = end.order, end.times
        stages = {"told": times.told_s, "planned": times.planned_s, "posted": times.posted_s}
        reached = {stage: moment for stage, moment in stages.items() if moment is not None}
        moments = {"ordered": times.ordered_s, **reached}
        if times.posted_s is not None and times.data_s is not None:
            moments["started"] = times.posted_s + times.queue_s
            moments["data"] = times.data_s
            moments["fence"] = times.data_s + times.fence_s
        moments |= {"ended": end.ended_s, "taken": taken_s, "completed": completed_s}
        self.begin(
            order.request_id,
            "consumer",
            moments,
            peer_engine_id=order.peer.engine_id,
            peer_request_id=short_id(order.peer_request_id),
            tokens=order.tokens,
            bytes=times.bytes_moved,
            code=end.code,
        )

    def describe(self) -> list[dict[str, object]]:
        """Return what is remembered, oldest first, as plain values."""
        with self._lock:
            entries = list(self._entries.items())
        return [
            {"request_id": key, "role": entry.role, **dict(entry.facts), "moments": dict(entry.moments)}
            for key, entry in entries
        ]
