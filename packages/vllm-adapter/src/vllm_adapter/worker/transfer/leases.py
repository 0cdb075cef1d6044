"""Producer side of a worker: leases, the fence words that end them, and readers' notifications; in turns of the thread."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_adapter.observe.answers import Answer, Entry
    from vllm_adapter.ports import LeaseEnd, LeaseTable, Notification, StepPlan, StreamWorker
    from vllm_adapter.worker.transfer.records import TransferParts

__all__ = ["LeaseKeeper"]

_MOST_PUSH_READERS = 64
_RANDOM_PART = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)
"""End that an engine appends to a request's id. Source: vLLM's input processor; its push connector compares ids without it."""


@final
class LeaseKeeper:
    """Keeps a finished prompt's blocks until its readers are done or its lease ends.

    The engine thread writes a request's fence word before the request can be handed over (`WorkerSide.apply`). This class
    overwrites the word before the blocks are reported free.

    A lease's *lag* is the time since its previous heartbeat, from any reader, beyond the interval of heartbeats. It is recorded
    once per heartbeat, for the lease in it that has waited longest, and once when a lease expires, because the longest silence
    ends without a heartbeat. Example: heartbeats are due every 5 s and one comes after 11.5 s: the lag is 6.5 s. The time before
    a lease's first heartbeat belongs to the router and is not lag.

    While no lease is granted, no reader has anything to report: the thread may poll slowly, and the grant itself wakes it.

    Args:
        parts: The registration's agent, codec, recorder and clock.
        leases: The lease table.
        sent: Called with every request whose blocks are free; cheap and thread-safe.
    """

    def __init__(self, parts: TransferParts, leases: LeaseTable, sent: Callable[[str], None]) -> None:
        self._parts = parts
        self._leases = leases
        self._sent = sent
        self.stream_worker: StreamWorker | None = None
        """Changes the words of streamed prompts; set before the first lease, None where nothing is streamed."""
        self._renewed_s: dict[str, float] = {}
        self._has_reported_surplus = False
        self._push_readers: set[str] = set()

    # ---------------------------------------------------------------------------------------------- orders

    def apply(self, plan: StepPlan) -> None:
        """Apply the producer's part of a step's orders; orders that the table refuses are counted and logged."""
        now_s, log = self._parts.now_s(), self._parts.recorder.hand_overs
        for grant in plan.grants:
            log.mark(grant.request_id, "granted", now_s, role="producer")
        for refusal in self._leases.apply(plan, now_s=now_s):
            self._parts.recorder.count("num_callback_errors")
            self._parts.recorder.warning(
                "refused-order",
                f"request {refusal.request_id}: the order to {refusal.order} its lease was refused: {refusal.message} "
                f"({refusal.code})",
            )
        self._parts.thread.allow_slow_polling(self._leases.granted_count() == 0)

    # ---------------------------------------------------------------------------------------------- notifications

    def notified(self, agent_name: str, payload: bytes) -> None:
        """Process a peer's notification; its content cannot make this raise."""
        view = self._parts.codec.parse_notification(payload)
        if view.kind == "heartbeat":
            self._renew(view)
            if view.surplus:
                self._parts.recorder.count("num_refused_notifications")
                if not self._has_reported_surplus:
                    self._has_reported_surplus = True
                    self._parts.recorder.warning(
                        "long-heartbeat",
                        f"a heartbeat of {agent_name[:200]!r} names more requests than are read ({view.surplus}): their leases "
                        "are not renewed. Further ones are counted only (num_refused_notifications)",
                    )
        elif view.kind == "read-complete":
            for named_id, nonce in zip(view.request_ids, view.nonces, strict=True):
                self._count_reader(self._leases.request_of(named_id), nonce, agent_name, view)
            self.tick()  # free a prompt that all readers have read at once, not at the timer's next turn
        else:
            self._parts.recorder.count("num_refused_notifications")
            if view.request_ids:
                self._end_registered(agent_name, view.request_ids[0])

    def _end_registered(self, agent_name: str, peer_request_id: str) -> None:
        """End the leases of a request for which a reader in push mode has registered: it waits for a write, and reads nothing.

        Such a reader names its own request. Two engines give a client's request ids that differ in their last part only.
        Example: `cmpl-7-0-5f0c11d2` there is `cmpl-7-0-91b7aa03` here.
        """
        now_s, client_id = self._parts.now_s(), _client_id(peer_request_id)
        verdicts = [
            self._leases.read_complete(request_id, reader=agent_name, reader_count=1, now_s=now_s)
            for request_id in self._leases.live_ids()
            if request_id.startswith(client_id) and _client_id(request_id) == client_id
        ]
        is_ended = "complete" in verdicts
        if agent_name not in self._push_readers and len(self._push_readers) < _MOST_PUSH_READERS:
            self._push_readers.add(agent_name)
            self._parts.recorder.warning(
                "push-reader",
                f"reader {agent_name[:200]!r} is in push mode and waits for this engine to write, which never writes: "
                f"the lease of its request {peer_request_id[:200]!r} {'ends now' if is_ended else 'is left to expire'}, and the "
                "request does not end there. Pair it with producers in push mode, and set no compatibility_policy 'off': "
                "'exact' and 'negotiated' refuse this pairing when it connects; logged once per reader",
            )
        self.tick()

    def _renew(self, view: Notification) -> None:
        now_s = self._parts.now_s()
        oldest_s: float | None = None
        for named_id, nonce in zip(view.request_ids, view.nonces, strict=True):
            request_id = self._leases.request_of(named_id)
            if not self._leases.renew(request_id, nonce=nonce, now_s=now_s):
                continue
            self._parts.recorder.count("num_lease_renewals")
            renewed_s = self._renewed_s.get(request_id)
            self._renewed_s[request_id] = now_s
            if renewed_s is not None:
                oldest_s = renewed_s if oldest_s is None else min(oldest_s, renewed_s)
        if oldest_s is not None:
            self._observe_lag(now_s - oldest_s)

    def _observe_lag(self, silence_s: float) -> None:
        self._parts.recorder.observe("heartbeat_lag_seconds", max(0.0, silence_s - self._parts.settings.heartbeat_s))

    def _count_reader(self, request_id: str, nonce: str, reader: str, view: Notification) -> None:
        now_s = self._parts.now_s()
        verdict = self._leases.read_complete(
            request_id,
            reader=reader,
            consumer=view.consumer,
            reader_count=view.reader_count,
            nonce=nonce,
            now_s=now_s,
        )
        if verdict == "complete":
            self._parts.recorder.hand_overs.mark(request_id, "read", now_s)
        if verdict == "expired":
            self._parts.recorder.count("num_notifications_after_expiry")
        elif verdict not in {"counted", "complete"}:
            self._parts.recorder.count("num_refused_notifications")

    # ---------------------------------------------------------------------------------------------- ends

    def tick(self, *, has_fences: bool = True) -> None:
        """End the leases that are due: void the fence first, then report the blocks free."""
        for end in self._leases.take_ended(now_s=self._parts.now_s()):
            if end.fence is not None and has_fences:
                self._parts.thread.write_fence(*end.fence)
                if self.stream_worker is not None:
                    self.stream_worker.leases_ended([end])  # voids a stream's progress word, too
            self._report(end, self._renewed_s.pop(end.request_id, None))
        # Poll for notifications often while a lease runs; the grant of an announced request wakes the thread. A prompt that
        # takes seconds is announced when it arrives; polling often from then on would take a tenth of a core.
        self._parts.thread.allow_slow_polling(self._leases.granted_count() == 0)

    def _report(self, end: LeaseEnd, renewed_s: float | None) -> None:
        if not end.is_reported:
            return  # the scheduler keeps no blocks for this request
        silence_s = None if renewed_s is None else self._parts.now_s() - renewed_s
        last = "no heartbeat ever came" if silence_s is None else f"last heartbeat {silence_s:.1f} s ago"
        if end.is_revoked:
            self._parts.recorder.count("num_revoked_leases")
            self._parts.recorder.warning(
                "lease-revoked",
                f"request {end.request_id}: this engine revoked its lease before it was read ({last}); its blocks are given "
                "back. A reader of ours that still comes finds its fence void; one of vLLM's own does not notice",
            )
        elif end.reason == "expired":
            if silence_s is not None:
                self._observe_lag(silence_s)
            self._parts.recorder.count("num_kv_expired_reqs")
            self._parts.recorder.warning(
                "lease-ended",
                f"request {end.request_id}: its lease ended before it was read ({last}); its blocks are given back, and a "
                "reader that still comes fails",
            )
        self._parts.recorder.hand_overs.mark(end.request_id, "freed", self._parts.now_s())
        self._sent(end.request_id)

    def end_all(self, *, has_fences: bool = True) -> None:
        """End every lease and report its blocks free.

        Args:
            has_fences: False if the fence array no longer exists, so that no word can be written.
        """
        now_s = self._parts.now_s()
        for entry in self._leases.snapshot(now_s=now_s):
            self._leases.release(str(entry["request_id"]), now_s=now_s)
        self.tick(has_fences=has_fences)

    def describe(self, most: int) -> Answer:
        """Return an operator's view: the number of open leases, and the oldest `most` of them."""
        now_s = self._parts.now_s()
        described: list[Entry] = []
        # Without the values that would let a reader of the description end the lease.
        for entry in self._leases.snapshot(now_s=now_s, most=most):
            renewed_s = self._renewed_s.get(str(entry["request_id"]))
            lease: Entry = {name: entry.get(name) for name in ("request_id", "state", "left_s", "readers_needed")}
            lease["readers_done"] = len(cast("Sequence[object]", entry.get("readers") or ()))
            lease["last_heartbeat_s"] = None if renewed_s is None else now_s - renewed_s
            described.append(lease)
        return {"leases": self._leases.live_count(), "oldest_leases": described}


def _client_id(request_id: str) -> str:
    return _RANDOM_PART.sub("", request_id)
