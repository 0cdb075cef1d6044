"""The facade of the scheduler process: the engine's hooks in, decisions and step plans out.

Theory of operation. The engine calls, per request and in this order: `arrive`; `external_tokens` any number of times;
`allocate` once or twice; `scheduled` for every chunk of a prefill; `preempt` perhaps; `finish` exactly once. Per step
it calls `take_step_plan`, and after a step `report` with the reports of its workers. Each call becomes one event per record
of the request (see `tables`). The rows of both records are looked up before either is applied, so a call either happens or
raises with nothing changed: first the producer's row is found, then `Consumers` finds the consumer's row and acts on it, then
`Producers` acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state.clock import ObservedClock
from kv_scheduler_state.errors import (
    DuplicateRequest,
    InvalidEvent,
    SchedulerStateError,
    UnknownRequest,
    quote,
    require_count,
)
from kv_scheduler_state.plan import Outbox, StepPlan
from kv_scheduler_state.records import (
    Request,
    count_states,
    describe,
    find_request,
    forget_if_ended,
    state_of,
)
from kv_scheduler_state.scheduler.admission import Admissions
from kv_scheduler_state.scheduler.consumer import Consumers
from kv_scheduler_state.scheduler.producer import Producers
from kv_scheduler_state.scheduler.streaming import Streams
from kv_scheduler_state.ticket.prompt import MEDIA_MISSING, require_identity
from kv_scheduler_state.ticket.seal import TicketSeal
from kv_scheduler_state.values import (
    BYSTANDER,
    Admission,
    BlockRules,
    FinishDecision,
    FinishReason,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state.config import SchedulerConfig
    from kv_scheduler_state.ticket.prompt import PromptIdentity

__all__ = ["SchedulerState"]

_HANDS_OVER: Final = {"length": True, "stop": True, "abort": False, "error": False}


@final
class SchedulerState:
    """Both records of every request of one engine's scheduler process.

    Not thread-safe: all calls come from the engine's scheduler thread.

    Args:
        config: The engine.
        secrets: Fleet secrets, each of 16 bytes or more: the first one seals this engine's tickets, all verify those of peers;
            none for tickets without seals.

    Attributes:
        streams: Streamed hand-overs; None if `config` has no stream slots and no blocks for streams.
        config: The engine that this state belongs to.
        is_draining: Whether `drain` was called.
    """

    def __init__(self, config: SchedulerConfig, *, secrets: Sequence[bytes] = ()) -> None:
        self.config = config
        self._clock = ObservedClock()
        self._outbox = Outbox(config.read_hold_steps)
        rules = BlockRules(config.groups, config.null_block)
        self._producers = producers = Producers(config, rules, self._outbox, self._clock)
        self._consumers = consumers = Consumers(config, rules, self._outbox, self._clock)
        self._requests = requests = dict[str, Request]()
        self._admissions = admissions = Admissions(consumers, producers)
        self.is_draining = False
        self.streams: Streams | None = None
        if config.stream_slots or config.reads_streams:
            self.streams = Streams(requests, consumers, producers, admissions, self._clock)
        if secrets:
            self.set_secrets(secrets)

    def __repr__(self) -> str:
        leases = f"{self.lease_count} leases, {self.fence_slots_used} of {self.config.fence_slots} fence slots used"
        return f"SchedulerState({self.config.engine_id!r}: {self.live_count} live requests, {leases})"

    # ---- the engine's hooks

    def arrive(
        self,
        request_id: str,
        params: object,
        *,
        prompt_tokens: int,
        identity: PromptIdentity,
        now_s: float,
    ) -> Admission:
        """Admit a request and return its role; a bad ticket is a value here, never an exception.

        Args:
            request_id: The engine's id of the request.
            params: Its `kv_transfer_params` as the client sent them; never changed.
            prompt_tokens: Length of its prompt.
            identity: Computes the digest of its prompt; with `UNBOUND` a ticket that is bound to a prompt is refused.
            now_s: The caller's monotonic clock.

        Raises:
            DuplicateRequest: `duplicate-request`, while a request of that id is live or has orders in the next plan.
            InvalidEvent: `invalid-event`, for an empty id, a negative length, no identity or an invalid time.
        """
        if type(request_id) is not str or not request_id:
            raise InvalidEvent(f"request_id is {quote(request_id)}, must be a string that is not empty")
        require_count("prompt_tokens", prompt_tokens)
        require_identity(identity)
        if request_id in self._requests:
            raise DuplicateRequest(request_id, state_of(self._requests[request_id]))
        if self._outbox.is_ending(request_id):
            raise DuplicateRequest(request_id, "waiting for its last orders to be taken")
        if request_id in self._consumers.unread:
            raise DuplicateRequest(request_id, "waiting for the report of its failure")
        request = Request(prompt_tokens, self._clock.observe(now_s))
        admission = BYSTANDER
        if params is not None:
            admission = self._admissions.admit(request_id, request, params, identity)
            request.rejected_code = admission.rejected_code
        self._requests[request_id] = request
        return admission

    def external_tokens(self, request_id: str, *, computed_tokens: int) -> int | None:
        """Return the prompt tokens to read from the peer beyond the local prefix hit; orders nothing.

        Returns None while another request with the same ticket reads, or while a stream has no offer or no room yet: ask again in
        a later step.

        Raises:
            UnknownRequest: `unknown-request`.
            InvalidEvent: `invalid-event`, for a negative count.
        """
        request = find_request(self._requests, request_id, "external-tokens")
        require_count("computed_tokens", computed_tokens)
        consumer = request.consumer
        return 0 if consumer is None else self._consumers.external_tokens(consumer, computed_tokens)

    def must_fail(self, request_id: str) -> bool:
        """Return whether the engine must end a request with an error: it lacks a part of the prompt, and reads none of it."""
        request = self._requests.get(request_id)
        return request is not None and request.rejected_code == MEDIA_MISSING

    def allocate(
        self,
        request_id: str,
        *,
        block_ids: Sequence[Sequence[int]],
        new_block_ids: Sequence[Sequence[int]],
        external_tokens: int,
        preemptions: int = 0,
        is_parked: bool = True,
        now_s: float,
    ) -> None:
        """Note that the engine gave blocks to a request, and order its read or notification.

        Args:
            request_id: The request.
            block_ids: All its blocks per group, in token order.
            new_block_ids: Those that no prefix hit covers; the read fills them.
            external_tokens: Tokens that the engine expects from the read; above 0 it parks the request.
            preemptions: How often the engine has taken the request's blocks away so far.
            is_parked: False if the engine has not given the blocks yet, and does so once the read has ended.
            now_s: The caller's monotonic clock.

        Raises:
            UnknownRequest: `unknown-request`.
            IllegalTransition: `illegal-transition`, for instance on a second read.
            InvalidEvent: `invalid-event`, for a wrong number of groups or more tokens than the peer holds. With external
                tokens, the parked request is then among the `failures` of the next plan, unless a read is under way.
        """
        try:
            request = find_request(self._requests, request_id, "allocate")
            consumer, producer = request.consumer, request.producer
            require_count("external_tokens", external_tokens)
            require_count("preemptions", preemptions)
            self._clock.observe(now_s)
            if consumer is not None:
                if producer is not None:
                    self._producers.rows_of_allocation(producer, preemptions)
                self._consumers.allocate(consumer, block_ids, new_block_ids, external_tokens)
            elif external_tokens:
                raise InvalidEvent(
                    f"request {quote(request_id)} expects {external_tokens} external tokens without a ticket"
                )
            if producer is not None:
                self._producers.allocate(producer, preemptions)
        except SchedulerStateError:
            if is_parked and type(request_id) is str and type(external_tokens) is int and external_tokens > 0:
                self._consumers.fail_parked(self._requests, request_id)
            raise

    def scheduled(
        self,
        request_id: str,
        *,
        new_block_ids: Sequence[Sequence[int]],
        is_prompt_complete: bool,
        computed_tokens: int = 0,
        touched_block_ids: Sequence[Sequence[int]] | None = None,
        held_tokens: int = 0,
    ) -> None:
        """Note that a chunk of a prefill runs in this step; order its host-buffer save, and the words of its stream.

        Args:
            request_id: The request; a request without a producer record is accepted and changes nothing.
            new_block_ids: Blocks per group that the chunk adds (a request's first chunk: all of them).
            is_prompt_complete: Whether the prompt is computed once this step is done.
            computed_tokens: Prompt tokens that are computed once this step is done; needed by a stream.
            touched_block_ids: Blocks per group that the chunk writes, and that are therefore saved; None for `new_block_ids`. A
                chunk that ends inside a block adds that block, and the next chunk writes it again.
            held_tokens: Tokens of a prefix hit that nothing in this step computes; only the first chunk's value has an effect.

        Raises:
            UnknownRequest: `unknown-request`.
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`, for a wrong number of groups.
        """
        producer = find_request(self._requests, request_id, "scheduled").producer
        if producer is not None:
            self._producers.scheduled(
                producer,
                new_block_ids,
                new_block_ids if touched_block_ids is None else touched_block_ids,
                is_last=is_prompt_complete,
                tokens=computed_tokens,
                held_tokens=held_tokens,
            )

    def preempt(self, request_id: str, *, now_s: float) -> None:
        """Note that the engine took a request's blocks away and will start it again.

        Raises:
            UnknownRequest: `unknown-request`.
            IllegalTransition: `illegal-transition`, while a read is running.
            InvalidEvent: `invalid-event`.
        """
        request = find_request(self._requests, request_id, "preempt")
        self._clock.observe(now_s)
        consumers, producers = self._consumers, self._producers
        consumer, producer = request.consumer, request.producer
        if producer is not None and producer.is_preemption_due:
            producer.is_preemption_due = False  # the allocation has reported it already, see `Producers.allocate`
            return
        consumer_row = consumer and consumers.table.find(request_id, consumer.state, "preempt")
        producer_row = producer and producers.table.find(request_id, producer.state, "preempt")
        if consumer is not None and consumer_row is not None:
            consumers.settle(consumer, consumer_row)
        if producer is not None and producer_row is not None:
            producers.preempt(producer, producer_row)

    def finish(
        self,
        request_id: str,
        *,
        reason: FinishReason,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        withhold: bool = False,
        identity: PromptIdentity,
        now_s: float,
    ) -> FinishDecision:
        """End a request and decide whether its blocks are handed over.

        Args:
            request_id: The request.
            reason: "length" and "stop" hand over; "abort" and "error" do not.
            block_ids: Its blocks per group, in token order.
            computed_tokens: Tokens whose KV these blocks hold for good; tokens of a step that still runs do not count.
            withhold: Whether to keep the ticket back although the request ended well.
            identity: Computes the digest that binds the ticket to the prompt; `UNBOUND` writes a ticket that serves any prompt.
            now_s: The caller's monotonic clock.

        Raises:
            UnknownRequest: `unknown-request`, also for a request that has already ended.
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`, for an unknown reason, no identity or a wrong number of groups.
        """
        request = find_request(self._requests, request_id, "finish")
        hands_over = _HANDS_OVER.get(reason)
        if hands_over is None:
            raise InvalidEvent(f"reason is {quote(reason)}, must be one of {sorted(_HANDS_OVER)}")
        require_count("computed_tokens", computed_tokens)
        require_identity(identity)
        self._clock.observe(now_s)
        producers, producer, consumer = self._producers, request.producer, request.consumer
        if producer is None:
            if consumer is not None:
                self._consumers.finish(consumer)
            request.is_finished = True
            forget_if_ended(self._requests, request_id, request)
            return FinishDecision(keep_blocks=False, params=None)
        params: dict[str, object] | None = None
        if hands_over:
            # This may raise, because it asks the host for the prompt's digest; nothing has changed yet.
            row, code, params = producers.ending(producer, block_ids, computed_tokens, identity, withhold=withhold)
        else:
            row, code = producers.table.find(request_id, producer.state, "drop"), ""
        if consumer is not None:
            self._consumers.finish(consumer)
        request.is_finished = True
        producers.finish(producer, row, block_ids, params)
        forget_if_ended(self._requests, request_id, request)
        # A reader of a stream may be at the blocks until its word has moved.
        return FinishDecision(params is not None or producer.state == "voiding", params, code)

    def report(self, *, sent: Sequence[str] = (), received: Sequence[str] = (), failed: Sequence[str] = ()) -> None:
        """Note the reports of the workers after a step.

        Args:
            sent: Producer requests whose lease has ended on every worker.
            received: Consumer requests whose read has ended on every worker.
            failed: Consumer requests whose read failed on some worker; they may, but need not, be in `received` too. Requests in
                a plan's `failures` are reported here.

        Raises:
            UnknownRequest: `unknown-request`. Either error is raised for the first id that was refused, and only after every
                legal id has been applied.
            IllegalTransition: `illegal-transition`.
        """
        if self._consumers.unread:
            unread = self._consumers.give_up_unread(self._requests, [*failed, *received])
            failed, received = [[each for each in ids if each not in unread] for ids in (failed, received)]
        if failed:
            received = [request_id for request_id in received if request_id not in failed]
        refusals: list[SchedulerStateError] = []
        events = ("sent", sent), (self._consumers.failure_event, failed), ("done", received)
        for event, request_ids in events:
            for request_id in request_ids:
                try:
                    request = find_request(self._requests, request_id, event)
                    producer, consumer = request.producer, request.consumer
                    if event == "sent" and producer is not None:
                        self._producers.sent(producer)
                    elif event != "sent" and consumer is not None:
                        row = self._consumers.table.find(request_id, consumer.state, event)
                        self._consumers.settle(consumer, row)
                    else:
                        refusals.append(UnknownRequest(request_id, event))
                    forget_if_ended(self._requests, request_id, request)
                except SchedulerStateError as error:
                    refusals.append(error)
        if refusals:
            raise refusals[0]

    def take_step_plan(self, *, now_s: float) -> StepPlan:
        """Return all orders since the last call.

        Raises:
            InvalidEvent: `invalid-event`; the orders stay for the next call.
        """
        at_s = self._clock.observe(now_s)
        heartbeats = self._consumers.heartbeats
        if heartbeats.due_s <= at_s:
            self._outbox.orders["heartbeats"].update({order.peer: order for order in heartbeats.take_due(at_s)})
        return self._outbox.take()

    def take_reads(self, request_ids: Sequence[str]) -> StepPlan:
        """Return the reads that were just ordered for these requests, in a plan of their own; the next one lacks them."""
        return StepPlan(tuple(map(self._outbox.orders["reads"].pop, request_ids)))

    # ---- operators and gauges

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """Seal and verify tickets with these fleet secrets from now on; the first one seals.

        Raises:
            InvalidConfig: `invalid-config`, for no secret or a short one; nothing is changed then.
        """
        self._producers.seal = self._admissions.seal = TicketSeal(secrets, self.config.unsealed_networks)

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
        return tuple(self._producers.leases.blocks)

    def drain(self) -> None:
        """Stop handing over: prompts end with the code `draining`. Outstanding leases and reads from peers continue."""
        self.is_draining = self._producers.is_draining = True

    def give_way(self, *, now_s: float) -> str:
        """Take the oldest readback's blocks back, or give up the newest read that waits for blocks if peers keep this engine's.

        Return the request whose read is given up, or an empty text.

        Call this where nothing has run for a while because requests lack blocks: two engines that read from each other may
        have leased all their blocks to requests that wait for blocks at the other, and whose heartbeats renew the leases
        without end. The request that gives way is computed here, and its peer gets its blocks back. Without leases and without
        streams that broke off there is no such circle. Readbacks come first: seldom is their reader here already.

        Raises:
            InvalidEvent: `invalid-event`.
        """
        self._clock.observe(now_s)
        for request in self._requests.values():
            producer = request.producer
            if producer is not None and producer.is_readback and self._producers.revoke(producer):
                return ""
        reads = [(name, each.consumer) for name, each in self._requests.items() if each.consumer is not None]
        if self._producers.leases or any(record.state == "awaiting" for _, record in reads):
            for request_id, record in reversed(reads):
                if record.state in {"queued", "offered"}:
                    self._consumers.give_up(record)
                    return request_id
        return ""

    def revoke_all(self, *, now_s: float) -> None:
        """Revoke every lease; the blocks are free once the workers report the requests as sent. Costs a scan.

        Raises:
            InvalidEvent: `invalid-event`.
        """
        self._clock.observe(now_s)
        for request in self._requests.values():
            producer = request.producer
            if producer is not None:
                self._producers.revoke(producer)

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
        self._clock.observe(now_s)
        for request in self._requests.values():
            if request.producer is not None:
                self._producers.void(request.producer)
            if request.consumer is not None:
                self._consumers.void(request.consumer)

    def snapshot(self, *, now_s: float, most: int | None = None) -> tuple[dict[str, object], ...]:
        """Return at most `most` live requests, oldest first, with age, states and the event that each waits for.

        Changes nothing, so any thread may call it; a request that changes meanwhile may show both states.
        """
        at_s, found = self._clock.peek(now_s), list(self._requests.items())[:most]
        return tuple([describe(name, request, at_s) for name, request in found])

    def state_counts(self) -> dict[str, int]:
        """Return how many live requests are in each state, such as `producer-leased`. Costs a scan; any thread."""
        return count_states(list(self._requests.values()))

    def explain(self, request_id: str, *, now_s: float) -> dict[str, object]:
        """Return one live request as `snapshot` does.

        Raises:
            UnknownRequest: `unknown-request`.
        """
        return describe(request_id, find_request(self._requests, request_id, "explain"), self._clock.peek(now_s))
