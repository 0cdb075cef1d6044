"""Progress watchdog: finds transfers on the wire that make no progress.

NIXL reports only whether a posted handle is done. So progress means that a part is posted or ends, or that the state changes; a
transfer whose parts each take longer than `stall_after_s` is reported too. A reported transfer continues: its deadline ends it,
and quarantine holds its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from ._values import StallEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._statistics import Statistics, Tracer
    from ._transfer import Transfer

__all__ = ["StallWatch"]

_LOOKS_PER_LIMIT: Final = 8


@final
class StallWatch:
    """Checks all posted transfers periodically; between two checks it costs one clock reading per poll."""

    def __init__(
        self, stall_after_s: float | None, statistics: Statistics, trace: Tracer, clock: Callable[[], float]
    ) -> None:
        self._limit_s = stall_after_s
        self._statistics = statistics
        self._trace = trace
        self._clock = clock
        self._next_look_s = 0.0
        self._marks: dict[str, tuple[Transfer, tuple[int, int, str], float]] = {}
        self._stalled: dict[str, tuple[Transfer, float]] = {}

    def look(self, posted: Mapping[str, Transfer]) -> None:
        """Compare the posted transfers with the last check, if the next check is due."""
        limit_s, now_s = self._limit_s, self._clock()
        if limit_s is None or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + limit_s / _LOOKS_PER_LIMIT
        before, self._marks = self._marks, {}
        stalled, self._stalled = self._stalled, {}
        for transfer_id, transfer in posted.items():
            mark = (len(transfer.active), len(transfer.pending), transfer.state)
            known, last, since_s = before.get(transfer_id, (None, None, 0.0))
            if known is not transfer or last != mark:
                since_s = now_s
            self._marks[transfer_id] = (transfer, mark, since_s)
            if now_s - since_s < limit_s:
                continue
            self._stalled[transfer_id] = (transfer, since_s)
            if transfer_id not in stalled:
                self._statistics.count("stalls_total")
                self._trace(transfer.order, "stalled", f"no part has ended for {now_s - since_s:.1f} s")

    def forget(self, transfer_id: str) -> None:
        """Discard the records of a transfer that has ended: its descriptor lists may be long, and the next check far away."""
        self._marks.pop(transfer_id, None)
        self._stalled.pop(transfer_id, None)

    def entries(self) -> Sequence[StallEntry]:
        """Return the transfers that had stalled at the last check and have not ended since."""
        return [
            StallEntry(
                transfer_id,
                transfer.peer.key,
                since_s,
                sum(part.payload_bytes for part in (*transfer.active, *transfer.pending)),
            )
            for transfer_id, (transfer, since_s) in self._stalled.items()
        ]
