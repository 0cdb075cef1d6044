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
    log: Callable[[str], None]


@final
class HoldCoordinator:
    """Keeps a finished prompt's blocks until its readers are done or its lease ends. Transfer thread only.

    A fence word is written (by the engine thread, `WorkerSide.start_step`) before its request can be handed over, and
    overwritten here before the blocks are reported free.
    """

    def __init__(
        self, leases: LeaseTable, codec: WireCodec, observer: HoldObserver, *, now_s: Callable[[], float]
    ) -> None:
        self._leases = leases
        self._codec = codec
        self._observer = observer
        self._now_s = now_s
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
            for request_id in view.request_ids:
                if self._leases.renew(request_id, now_s=self._now_s()):
                    self._observer.count("num_lease_renewals")
        elif view.kind == "read-complete":
            for request_id in view.request_ids:
                self._count_reader(request_id, agent_name, view.reader_count)
        else:
            self._observer.count("num_refused_notifications")

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
        for end in self._leases.take_ended(now_s=self._now_s()):
            if end.fence is not None and has_fences:
                self._agent.write_fence(*end.fence)
            if not end.is_reported:
                continue  # the scheduler kept no blocks for it
            if end.reason == "expired":
                self._observer.count("num_kv_expired_reqs")
                self._observer.log(
                    f"request {end.request_id}: its lease ended before it was read; its blocks are given back"
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
