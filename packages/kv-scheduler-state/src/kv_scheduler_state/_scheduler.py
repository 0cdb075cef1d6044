"""The facade of the scheduler process: the engine's hooks in, decisions and step plans out.

Theory of operation. The engine calls, per request and in this order: `arrive`; `external_tokens` any number of times;
`allocate` once or twice; `scheduled` for every chunk of a prefill; `preempt` perhaps; `finish` exactly once. Per step
it calls `take_step_plan`, and after a step `transfer_results` with what its workers reported. Each call is turned
into one event per half of the request (see `_tables`); rows for all halves are looked up before any of them is
applied, so a call either happens or raises with nothing changed: the facade finds the producer's row, then the
consumer's desk finds its own and acts on it, then the producer's acts.

Nothing is ever scanned: a call costs what its own request costs, and a step in which nothing happened costs two
comparisons and returns one shared empty plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state._admission import AdmissionDesk
from kv_scheduler_state._arguments import refuse_count
from kv_scheduler_state._blocks import BlockClipper
from kv_scheduler_state._clock import ObservedClock
from kv_scheduler_state._config import MAX_GENERATION
from kv_scheduler_state._consumer import ConsumerDesk
from kv_scheduler_state._decisions import BYSTANDER, NOT_KEPT, Admission, FinishDecision, FinishReason
from kv_scheduler_state._errors import (
    DuplicateRequest,
    InvalidEvent,
    SchedulerStateError,
    UnknownRequest,
    quote,
)
from kv_scheduler_state._introspection import count_states, describe, violations, youngest_leases
from kv_scheduler_state._live import Live, forget_if_ended, void_all
from kv_scheduler_state._outbox import Outbox
from kv_scheduler_state._plan import EMPTY_PLAN, StepPlan
from kv_scheduler_state._producer import ProducerDesk
from kv_scheduler_state._records import new_tuple
from kv_scheduler_state._reports import ReportDesk
from kv_scheduler_state._tables import CONSUMER_TABLE, PRODUCER_TABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._config import SchedulerConfig
    from kv_scheduler_state._machine import Table

__all__ = ["SchedulerState"]

_HANDS_OVER: Final = {"length": True, "stop": True, "abort": False, "error": False}


@final
class SchedulerState:
    """Both halves of every request of one engine's scheduler process.

    Not thread-safe: all calls come from the engine's scheduler thread.

    Args:
        config: The engine.
        producer_table: The producer machine; another one only makes sense to a proof.
        consumer_table: The consumer machine; another one only makes sense to a proof.
    """

    __slots__ = (
        "_admissions",
        "_clipper",
        "_clock",
        "_config",
        "_consumers",
        "_live",
        "_outbox",
        "_producers",
        "_reports",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        producer_table: Table = PRODUCER_TABLE,
        consumer_table: Table = CONSUMER_TABLE,
    ) -> None:
        self._config = config
        self._clock = ObservedClock()
        self._clipper = BlockClipper(config.groups)
        self._outbox = Outbox()
        self._producers = ProducerDesk(config, producer_table, self._clipper, self._outbox)
        self._consumers = ConsumerDesk(config, consumer_table, self._clipper, self._outbox)
        self._live: dict[str, Live] = {}
        self._admissions = AdmissionDesk(config, self._consumers, self._producers)
        self._reports = ReportDesk(self._live, self._clock, self._consumers, self._producers)

    @property
    def config(self) -> SchedulerConfig:
        """The engine that this state belongs to."""
        return self._config

    def arrive(self, request_id: str, params: object, *, prompt_tokens: int, now_s: float) -> Admission:
        """Admit a request and return its role; a bad ticket is a value here, never an exception.

        Args:
            request_id: The engine's id of the request.
            params: Its `kv_transfer_params` as the client sent them; never changed.
            prompt_tokens: Length of its prompt.
            now_s: The caller's monotonic clock.

        Raises:
            DuplicateRequest: `duplicate-request`, while a request of that id is live or has orders in the next plan.
            InvalidEvent: `invalid-event`, for an empty id, a negative length or a time that is none.
        """
        if type(request_id) is not str or not request_id:
            raise InvalidEvent(f"request_id is {quote(request_id)}, must be a string that is not empty")
        if type(prompt_tokens) is not int or prompt_tokens < 0:
            refuse_count("prompt_tokens", prompt_tokens)
        known = self._live.get(request_id)
        if known is not None:
            raise DuplicateRequest(request_id, str(describe(request_id, known, 0.0)["state"]))
        if self._outbox.has_orders and self._outbox.is_parting(request_id):
            raise DuplicateRequest(request_id, "waiting for its last orders to be taken")
        at_s = self._clock.observe(now_s)
        live = Live(prompt_tokens, at_s)
        admission = (
            BYSTANDER if params is None else self._admissions.admit(request_id, live, params, prompt_tokens, at_s)
        )
        self._live[request_id] = live
        return admission

    def external_tokens(self, request_id: str, *, computed_tokens: int) -> int:
        """Return the prompt tokens to read from the peer beyond the local prefix hit; changes nothing.

        Raises:
            UnknownRequest: `unknown-request`.
            InvalidEvent: `invalid-event`, for a negative count.
        """
        try:
            live = self._live[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(request_id, "external-tokens") from None
        if type(computed_tokens) is not int or computed_tokens < 0:
            refuse_count("computed_tokens", computed_tokens)
        consumer = live.consumer
        return 0 if consumer is None else self._consumers.external_tokens(consumer, computed_tokens)

    def allocate(
        self,
        request_id: str,
        *,
        block_ids: Sequence[Sequence[int]],
        new_block_ids: Sequence[Sequence[int]],
        external_tokens: int,
        now_s: float,
    ) -> None:
        """Note that the engine gave blocks to a request, and order its read or notification.

        Args:
            request_id: The request.
            block_ids: All its blocks per group, in token order.
            new_block_ids: Those that no prefix hit covers; the read fills them.
            external_tokens: Tokens that the engine expects from the read; above 0 it parks the request.
            now_s: The caller's monotonic clock.

        Raises:
            UnknownRequest: `unknown-request`.
            IllegalTransition: `illegal-transition`, for instance on a second read.
            InvalidEvent: `invalid-event`, for a wrong number of groups or more tokens than the peer holds.
        """
        try:
            live = self._live[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(request_id, "allocate") from None
        consumer, producer = live.consumer, live.producer
        if consumer is None and producer is None:
            return
        if type(external_tokens) is not int or external_tokens < 0:
            refuse_count("external_tokens", external_tokens)
        at_s = self._clock.observe(now_s)
        producers, producer_row = self._producers, None
        if producer is not None:
            producer_row = producers.on_allocate.get(producer.state)
            producer_row = producer_row or producers.table.refuse(request_id, producer.state, "allocate")
        if consumer is not None:
            self._consumers.allocate(request_id, consumer, block_ids, new_block_ids, external_tokens, at_s)
        if producer is not None and producer_row is not None:
            producers.allocate(request_id, producer, producer_row, at_s)

    def scheduled(self, request_id: str, *, new_block_ids: Sequence[Sequence[int]], is_prompt_complete: bool) -> None:
        """Note that a chunk of a prefill runs in this step, and order its host-buffer save.

        Args:
            request_id: The request; anything but a producer is accepted and changes nothing.
            new_block_ids: Blocks per group that the chunk adds (a request's first chunk: all of them).
            is_prompt_complete: Whether the prompt is computed once this step is done.

        Raises:
            UnknownRequest: `unknown-request`.
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`, for a wrong number of groups.
        """
        producer = self._find(request_id, "scheduled").producer
        if producer is None:
            return
        row = self._producers.table.find(request_id, producer.state, "last-chunk" if is_prompt_complete else "chunk")
        blocks = self._clipper.clip(new_block_ids, is_partial=True)
        self._producers.scheduled(request_id, producer, row, blocks, self._clock.observed_s)

    def preempt(self, request_id: str, *, now_s: float) -> None:
        """Note that the engine took a request's blocks away and will start it again.

        Raises:
            UnknownRequest: `unknown-request`.
            IllegalTransition: `illegal-transition`, while a read is running.
            InvalidEvent: `invalid-event`.
        """
        live = self._find(request_id, "preempt")
        consumer, producer = live.consumer, live.producer
        consumer_row = consumer and self._consumers.table.find(request_id, consumer.state, "preempt")
        producer_row = producer and self._producers.table.find(request_id, producer.state, "preempt")
        at_s = self._clock.observe(now_s)
        if consumer is not None and consumer_row is not None:
            self._consumers.settle(request_id, consumer, consumer_row, at_s)
        if producer is not None and producer_row is not None:
            self._producers.preempt(request_id, producer, producer_row, at_s)

    def finish(
        self,
        request_id: str,
        *,
        reason: FinishReason,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        now_s: float,
    ) -> FinishDecision:
        """End a request and decide whether its blocks are handed over.

        Args:
            request_id: The request.
            reason: "length" and "stop" hand over; "abort" and "error" do not.
            block_ids: Its blocks per group, in token order.
            computed_tokens: Tokens whose KV these blocks hold.
            now_s: The caller's monotonic clock.

        Raises:
            UnknownRequest: `unknown-request`; among others for a second end.
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`, for an unknown reason or a wrong number of groups.
        """
        try:
            live = self._live[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(request_id, "finish") from None
        hands_over = _HANDS_OVER.get(reason)
        if hands_over is None:
            raise InvalidEvent(f"reason is {quote(reason)}, must be one of {sorted(_HANDS_OVER)}")
        if type(computed_tokens) is not int or computed_tokens < 0:
            refuse_count("computed_tokens", computed_tokens)
        at_s = self._clock.observe(now_s)
        producers, producer, producer_row = self._producers, live.producer, None
        if producer is not None:
            if hands_over and any(block_ids) and not producer.is_void:
                producer_row = producers.on_hand_over.get(producer.state)
                producer_row = producer_row or producers.table.refuse(request_id, producer.state, "hand-over")
                self._clipper.require_groups(block_ids)
            else:
                producer_row = producers.on_drop.get(producer.state)
                producer_row = producer_row or producers.table.refuse(request_id, producer.state, "drop")
        consumer, params = live.consumer, None
        if consumer is not None:
            self._consumers.finish(request_id, consumer, at_s)
        live.is_finished = True
        if producer is not None and producer_row is not None:
            params = producers.finish(request_id, producer, producer_row, block_ids, computed_tokens, at_s)
        if params is None or consumer is not None:
            forget_if_ended(self._live, request_id, live)
        return NOT_KEPT if params is None else new_tuple(FinishDecision, (True, params))

    def transfer_results(self, *, sent: Sequence[str], received: Sequence[str], failed: Sequence[str]) -> None:
        """Note what the workers reported after a step.

        Args:
            sent: Producer requests whose lease has ended on every worker.
            received: Consumer requests whose read has ended, well or not.
            failed: Those of them whose read failed; an id here need not be in `received` too.

        Raises:
            UnknownRequest: `unknown-request`.
            IllegalTransition: `illegal-transition`.

            Either is raised only after every legal id has been applied, and then for the first that was not: a caller
            who logs and goes on loses nothing.
        """
        refusals: list[SchedulerStateError] = []
        reports, consumers = self._reports, self._consumers
        if sent:
            reports.sent(sent, refusals)
        if failed:
            reports.reads_ended(failed, consumers.failure_event, consumers.on_failure, refusals)
            broken = set(failed)
            received = [request_id for request_id in received if request_id not in broken]
        if received:
            reports.reads_ended(received, "done", consumers.on_done, refusals)
        if refusals:
            raise refusals[0]

    def take_step_plan(self, *, now_s: float) -> StepPlan:
        """Return everything that the workers must be told since the last call.

        Raises:
            InvalidEvent: `invalid-event`; the orders stay for the next call.
        """
        at_s = self._clock.observe(now_s)
        heartbeats, outbox = self._consumers.heartbeats, self._outbox
        if heartbeats.next_due_s <= at_s:
            outbox.heartbeats.extend(heartbeats.take_due(at_s))
            return outbox.take()
        return outbox.take() if outbox.has_orders else EMPTY_PLAN

    def has_work(self) -> bool:
        """Whether orders wait for a step, even if the engine has no model work; heartbeats do not count."""
        return self._outbox.has_orders

    @property
    def heartbeat_delay_s(self) -> float:
        """How long the heartbeats of the latest plan that has any had been due: those to the most overdue peer engine."""
        return self._consumers.heartbeats.last_delay_s

    @property
    def live_count(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._live)

    def revocable_leases(self, limit: int = 16) -> tuple[str, ...]:
        """Return up to `limit` requests whose lease could be taken back, youngest first.

        The scheduler does not hear of single readers; a worker's lease table knows which of these are unread.
        """
        return youngest_leases(self._live, limit)

    def revoke(self, request_id: str, *, now_s: float) -> None:
        """End a lease early; the blocks are free once the workers report the request as sent.

        Raises:
            UnknownRequest: `unknown-request`, also for a request that is no producer.
            IllegalTransition: `illegal-transition`, for a request without a lease.
            InvalidEvent: `invalid-event`.
        """
        producer = self._find(request_id, "revoke").producer
        if producer is None:
            raise UnknownRequest(request_id, "revoke")
        row = self._producers.table.find(request_id, producer.state, "revoke")
        self._producers.revoke(request_id, producer, row, self._clock.observe(now_s))

    def set_generation(self, generation: int | None) -> None:
        """Tell consumers this generation of the engine's memory registration from now on; None keeps silent.

        Raises:
            InvalidEvent: `invalid-event`, for a number that no consumer would accept.
        """
        if generation is not None and (type(generation) is not int or not 0 <= generation <= MAX_GENERATION):
            raise InvalidEvent(f"generation is {quote(generation)}, must be 0 to 2**63 - 1 or None")
        self._producers.set_generation(generation)

    def reset(self, *, now_s: float) -> tuple[str, ...]:
        """Void all KV that was computed or promised before now; return the requests whose read is under way. Costs a scan.

        Leases are revoked. What is being computed is handed over only if it is preempted and started again. Tickets whose
        read has not been ordered are given up: their producers are told, and the prompts are computed here. Reads under way
        are the caller's to end; their pages hold KV from before.

        Raises:
            InvalidEvent: `invalid-event`.
        """
        at_s = self._clock.observe(now_s)
        return void_all(self._live, self._consumers, self._producers, at_s)

    def snapshot(self, *, now_s: float) -> tuple[dict[str, object], ...]:
        """Return every live request with its age, its states, its traces and what it waits for, oldest first."""
        at_s = self._clock.observe(now_s)
        return tuple([describe(request_id, live, at_s) for request_id, live in self._live.items()])

    def state_counts(self) -> dict[str, int]:
        """Return how many live requests are in each state, such as `producer-leased`. Costs a scan."""
        return count_states(self._live.values())

    def explain(self, request_id: str, *, now_s: float) -> dict[str, object]:
        """Return one live request as `snapshot` does.

        Raises:
            UnknownRequest: `unknown-request`.
        """
        live = self._find(request_id, "explain")
        return describe(request_id, live, self._clock.observe(now_s))

    def check_invariants(self) -> tuple[str, ...]:
        """Return every broken internal promise in words; empty when the state is sound. Costs a scan."""
        return tuple(violations(self._live, self._consumers, self._producers, self._outbox))

    def _find(self, request_id: str, event: str) -> Live:
        try:
            return self._live[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(request_id, event) from None
