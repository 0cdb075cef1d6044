"""The producer's part of a worker: fence words, leases and the notifications of readers, all on the transfer thread."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_adapter.ports import LeaseTable, StepPlan, TransferThread, WireCodec

__all__ = ["HoldCoordinator", "HoldObserver"]


@dataclass(frozen=True, slots=True)
class HoldObserver:
    """Where the coordinator reports; all callables are cheap and thread-safe."""

    sent: Callable[[str], None]
    count: Callable[[str], None]
    observe: Callable[[str, float], None]
    log: Callable[[str], None]


@final
class HoldCoordinator:
    """Keeps a finished prompt's blocks until its readers are done or its lease ends. Transfer thread only.

    A fence word is written (by the engine thread, `WorkerSide.start_step`) before its request can be handed over, and
    overwritten here before the blocks are reported free.

    A lease's *lag* is the time since its previous heartbeat, of whichever reader, beyond `heartbeat_s`. It is observed per
    heartbeat, as that of the most neglected lease in it, and once more when a lease expires, because the longest silence
    is the one that no heartbeat ends. The time before a lease's first heartbeat is the router's and no lag.

    Args:
        leases: The lease table.
        codec: Reads notifications.
        observer: Where to report.
        heartbeat_s: Time between two heartbeats of a reader that is on time.
        now_s: The caller's monotonic clock.
    """

    def __init__(
        self,
        leases: LeaseTable,
        codec: WireCodec,
        observer: HoldObserver,
        *,
        heartbeat_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self._leases = leases
        self._codec = codec
        self._observer = observer
        self._heartbeat_s = heartbeat_s
        self._now_s = now_s
        self._heard_s: dict[str, float] = {}
        self._agent: TransferThread | None = None

    def attach(self, agent: TransferThread) -> None:
        """Connect the thread whose fence array is written; before the first order."""
        self._agent = agent

    def expect(self, request_ids: Iterable[str]) -> None:
        """Announce requests whose readers may be heard before their grants."""
        now_s = self._now_s()
        for request_id in request_ids:
            self._attempt(partial(self._leases.expect, request_id, now_s=now_s))

    def apply(self, plan: StepPlan, void: Sequence[str] = ()) -> None:
        """Perform the producer's part of a step's orders, in the order that makes each safe.

        An order that the lease table refuses is counted and logged; the others are performed all the same.

        Args:
            plan: The orders.
            void: Requests among its grants whose KV is lost: their leases end at once.
        """
        now_s = self._now_s()
        leases = self._leases
        self.expect(plan.expects)
        for grant in plan.grants:
            order = partial(leases.grant, grant.request_id, lease_s=grant.lease_s, fence=grant.fence, now_s=now_s)
            self._attempt(order)
        for request_id in (*plan.releases, *plan.revokes, *void):
            self._attempt(partial(leases.release, request_id, now_s=now_s))

    def _attempt(self, order: Callable[[], None]) -> None:
        try:
            order()
        except Exception as error:  # noqa: BLE001  (a contradiction between two processes must not end this thread)
            self._observer.count("num_refused_notifications")
            self._observer.log(f"an order of the scheduler was refused: {error}")

    def notified(self, agent_name: str, payload: bytes) -> None:
        """Take in a peer's notification; nothing that it holds can raise."""
        view = self._codec.parse_notification(payload)
        if view.kind == "heartbeat":
            self._renew(view.request_ids)
        elif view.kind == "read-complete":
            for request_id in view.request_ids:
                self._count_reader(request_id, agent_name, view.reader_count)
        else:
            self._observer.count("num_refused_notifications")

    def _renew(self, request_ids: Sequence[str]) -> None:
        now_s = self._now_s()
        oldest_s: float | None = None
        for request_id in request_ids:
            if not self._leases.renew(request_id, now_s=now_s):
                continue
            self._observer.count("num_lease_renewals")
            heard_s = self._heard_s.get(request_id)
            self._heard_s[request_id] = now_s
            if heard_s is not None:
                oldest_s = heard_s if oldest_s is None else min(oldest_s, heard_s)
        if oldest_s is not None:
            self._observe_lag(now_s - oldest_s)

    def _observe_lag(self, silence_s: float) -> None:
        self._observer.observe("heartbeat_lag", max(0.0, silence_s - self._heartbeat_s))

    def _count_reader(self, request_id: str, reader: str, reader_count: int) -> None:
        verdict = self._leases.read_complete(request_id, reader=reader, reader_count=reader_count, now_s=self._now_s())
        if verdict == "expired":
            self._observer.count("num_notifications_after_expiry")
        elif verdict not in {"counted", "complete"}:
            self._observer.count("num_refused_notifications")

    def tick(self) -> None:
        """End what is due: bump the fence first, then report the blocks free."""
        self._end_due(has_fences=True)

    def _end_due(self, *, has_fences: bool) -> None:
        assert self._agent is not None  # noqa: S101
        now_s = self._now_s()
        for end in self._leases.take_ended(now_s=now_s):
            heard_s = self._heard_s.pop(end.request_id, None)
            if end.fence is not None and has_fences:
                self._agent.write_fence(*end.fence)
            if not end.is_reported:
                continue  # the scheduler kept no blocks for it
            if end.reason == "expired":
                self._observer.count("num_kv_expired_reqs")
                if heard_s is not None:
                    self._observe_lag(now_s - heard_s)
                last = "no heartbeat ever came" if heard_s is None else f"last heartbeat {now_s - heard_s:.1f} s ago"
                self._observer.log(
                    f"request {end.request_id}: its lease ended before it was read ({last}); its blocks are given back"
                )
            self._observer.sent(end.request_id)

    def end_all(self, *, has_fences: bool = True) -> None:
        """End every lease and report its blocks free.

        Args:
            has_fences: False if there is no fence array any more, so that no word can be written.
        """
        now_s = self._now_s()
        for entry in self._leases.snapshot(now_s=now_s):
            self._leases.release(str(entry["request_id"]), now_s=now_s)
        self._end_due(has_fences=has_fences)

    def live_count(self) -> int:
        """Return how many leases are open."""
        return self._leases.live_count()
