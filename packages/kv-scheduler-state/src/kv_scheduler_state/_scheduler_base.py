"""The parts of the scheduler process's state, and the calls of operators, gauges and rare events.

`SchedulerState` adds the engine's hooks, which are called for every request or step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_scheduler_state._admission import Admissions
from kv_scheduler_state._blocks import BlockRules
from kv_scheduler_state._clock import ObservedClock
from kv_scheduler_state._consumer import Consumers
from kv_scheduler_state._errors import UnknownRequest
from kv_scheduler_state._introspection import count_states, describe, violations
from kv_scheduler_state._outbox import Outbox
from kv_scheduler_state._producer import Producers
from kv_scheduler_state._reports import Reports
from kv_scheduler_state._request import Request, void_all
from kv_scheduler_state._seal import TicketSeal
from kv_scheduler_state._stream_tables import STREAM_CONSUMER_TABLE, STREAM_PRODUCER_TABLE
from kv_scheduler_state._tables import CONSUMER_TABLE, PRODUCER_TABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._config import SchedulerConfig

__all__ = ["SchedulerBase"]


class SchedulerBase:
    """State without the engine's hooks, see `SchedulerState`."""

    __slots__ = (
        "_admissions",
        "_clock",
        "_config",
        "_consumers",
        "_heartbeats",
        "_outbox",
        "_producers",
        "_reports",
        "_requests",
        "_rules",
    )

    def __init__(self, config: SchedulerConfig, *, secrets: Sequence[bytes] = ()) -> None:
        self._config = config
        self._clock = ObservedClock()
        self._rules = BlockRules(config.groups, config.null_block)
        self._outbox = Outbox(config.read_hold_steps)
        producing = PRODUCER_TABLE.joined(STREAM_PRODUCER_TABLE)
        self._producers = Producers(config, producing, self._rules, self._outbox)
        self._consumers = Consumers(config, CONSUMER_TABLE.joined(STREAM_CONSUMER_TABLE), self._rules, self._outbox)
        self._heartbeats = self._consumers.heartbeats
        self._requests: dict[str, Request] = {}
        self._reports = Reports(self._requests, self._clock, self._consumers, self._producers)
        self._admissions = Admissions(self._consumers, self._producers)
        if secrets:
            self.set_secrets(secrets)

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """Seal and verify tickets with these fleet secrets from now on; the first one seals.

        Raises:
            InvalidConfig: `invalid-config`, for no secret or a short one; nothing is changed then.
        """
        seal = TicketSeal(secrets, self._config.unsealed_networks)
        self._producers.seal = self._admissions.seal = self._admissions.early.seal = seal

    @property
    def config(self) -> SchedulerConfig:
        """The engine that this state belongs to."""
        return self._config

    def has_work(self) -> bool:
        """Whether orders wait for a step, even if the engine has no model work; heartbeats do not count."""
        return self._outbox.has_orders

    @property
    def heartbeat_delay_s(self) -> float:
        """Delay of the heartbeats in the latest plan that contained any: that of the most overdue peer engine."""
        return self._consumers.heartbeats.last_delay_s

    @property
    def live_count(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._requests)

    @property
    def fence_slots_used(self) -> int:
        """Fence slots in use; with all of `config.fence_slots` in use nothing is handed over."""
        return self._producers.fences.used

    @property
    def lease_count(self) -> int:
        """Outstanding leases: granted, and not reported as `sent` yet."""
        return len(self._producers.leases)

    @property
    def leased_blocks(self) -> tuple[int, ...]:
        """Blocks that the leases keep, per KV-cache group; null blocks do not count, blocks of two leases count twice."""
        return self._producers.leases.blocks

    @property
    def is_draining(self) -> bool:
        """Whether `drain` was called."""
        return self._producers.is_draining

    def drain(self) -> None:
        """Stop handing over: prompts end with the code `draining`. Outstanding leases and reads from peers continue."""
        self._producers.is_draining = True

    def give_way(self, *, now_s: float) -> str:
        """Take the oldest readback's blocks back, or give up the newest read that waits for blocks if peers keep this engine's.

        Return the request whose read is given up, or an empty text.

        Call this where nothing has run for a while because requests lack blocks. Two engines that read from each other may
        both have leased all their blocks, each to requests that wait for blocks at the other; the heartbeats of those requests
        would renew the leases without end. The request that gives way is computed here, and its peer gets its blocks back: no
        lease that a reader counts on is revoked for it. An engine without leases and without streams that broke off is in no
        such circle: whatever holds its blocks ends by itself.

        Blocks for the next turn of a conversation are kept for minutes, whether it comes or not, and seldom is its reader here
        already. So their lease is revoked before a read is given up.

        Raises:
            InvalidEvent: `invalid-event`.
        """
        at_s = self._clock.observe(now_s)
        if self._config.bidirectional and self._revoke_readback(at_s):
            return ""
        if self._producers.leases or self._consumers.streams.has_broken_off:
            for request_id, request in reversed(self._requests.items()):
                consumer = request.consumer
                if consumer is not None and consumer.state in {"queued", "offered"}:
                    self._consumers.give_up(request_id, consumer, at_s)
                    return request_id
        return ""

    def _revoke_readback(self, at_s: float) -> bool:
        """Revoke the oldest lease for a next turn; return False if there is none."""
        for request_id, request in self._requests.items():
            producer = request.producer
            if producer is not None and producer.is_readback and producer.state == "leased":
                row = self._producers.table.find(request_id, producer.state, "revoke")
                self._producers.revoke(request_id, producer, row, at_s)
                return True
        return False

    def revoke(self, request_id: str, *, now_s: float) -> None:
        """End a lease early; the blocks are free once the workers report the request as sent.

        Raises:
            UnknownRequest: `unknown-request`, also for a request without a producer record.
            IllegalTransition: `illegal-transition`, for a request without a lease.
        """
        producer = self._find(request_id, "revoke").producer
        if producer is None:
            raise UnknownRequest(request_id, "revoke")
        row = self._producers.table.find(request_id, producer.state, "revoke")
        self._producers.revoke(request_id, producer, row, self._clock.observe(now_s))

    def revoke_all(self, *, now_s: float) -> None:
        """Revoke every lease. Costs a scan.

        Raises:
            InvalidEvent: `invalid-event`.
        """
        at_s = self._clock.observe(now_s)
        for request_id, request in self._requests.items():
            producer = request.producer
            if producer is not None and (row := self._producers.on_revoke.get(producer.state)) is not None:
                self._producers.revoke(request_id, producer, row, at_s)

    def set_generation(self, generation: int | None) -> None:
        """Name this generation of the engine's memory registration in tickets from now on; None names none.

        Raises:
            InvalidEvent: `invalid-event`, for a number that no consumer would accept.
        """
        self._producers.set_generation(generation)

    def reset(self, *, now_s: float) -> None:
        """Void all KV that was computed or promised before now. Costs a scan.

        Leases are revoked. A prompt that is being computed is handed over only if it is preempted and started again. Tickets
        whose read has not been ordered are given up: their producers are notified, and the prompts are computed here. Running
        reads are in the next plan's `voids`: they must fail, because their pages hold KV from before the reset.

        Raises:
            InvalidEvent: `invalid-event`.
        """
        at_s = self._clock.observe(now_s)
        void_all(self._requests, self._consumers, self._producers, at_s)

    def snapshot(self, *, now_s: float, most: int | None = None) -> tuple[dict[str, object], ...]:
        """Return at most `most` live requests, oldest first, with age, states, traces and the event that each waits for.

        Changes nothing, time included, so another thread may look; a request that changes meanwhile may show both states.
        """
        at_s, found = self._clock.peek(now_s), list(self._requests.items())[:most]
        return tuple([describe(name, request, at_s, self._config.trace_length) for name, request in found])

    def state_counts(self) -> dict[str, int]:
        """Return how many live requests are in each state, such as `producer-leased`. Costs a scan; any thread."""
        return count_states(list(self._requests.values()))

    def explain(self, request_id: str, *, now_s: float) -> dict[str, object]:
        """Return one live request as `snapshot` does.

        Raises:
            UnknownRequest: `unknown-request`.
        """
        request = self._find(request_id, "explain")
        return describe(request_id, request, self._clock.peek(now_s), self._config.trace_length)

    def check_invariants(self) -> tuple[str, ...]:
        """Return every broken internal promise in words; empty when the state is sound. Costs a scan."""
        return tuple(violations(self._requests, self._consumers, self._producers, self._outbox))

    def _find(self, request_id: str, event: str) -> Request:
        try:
            return self._requests[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(request_id, event) from None
