"""The facade of the scheduler process: the engine's hooks in, decisions and step plans out.

Theory of operation. The engine calls, per request and in this order: `arrive`; `external_tokens` any number of times;
`allocate` once or twice; `scheduled` for every chunk of a prefill; `preempt` perhaps; `finish` exactly once. Per step
it calls `take_step_plan`, and after a step `report` with the reports of its workers. Each call becomes one event per record
of the request (see `_tables`). The rows of both records are looked up before either is applied, so a call either happens
or raises with nothing changed: first the producer's row is found, then `Consumers` finds the consumer's row and acts on it,
then `Producers` acts.

Nothing is scanned: a step in which nothing happened costs two comparisons and returns one shared empty plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state._admission import Admissions
from kv_scheduler_state._blocks import BlockRules
from kv_scheduler_state._clock import ObservedClock
from kv_scheduler_state._consumer import Consumers
from kv_scheduler_state._endings import Endings
from kv_scheduler_state._errors import InvalidEvent, SchedulerStateError, UnknownRequest, quote, refuse_count
from kv_scheduler_state._introspection import count_states, describe, violations
from kv_scheduler_state._outbox import Outbox
from kv_scheduler_state._plan import EMPTY_PLAN
from kv_scheduler_state._producer import Producers
from kv_scheduler_state._reports import Reports
from kv_scheduler_state._request import Request, preempt, void_all
from kv_scheduler_state._seal import TicketSeal
from kv_scheduler_state._tables import CONSUMER_TABLE, PRODUCER_TABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._config import SchedulerConfig
    from kv_scheduler_state._decisions import Admission, FinishDecision, FinishReason
    from kv_scheduler_state._machine import Table
    from kv_scheduler_state._plan import StepPlan
    from kv_scheduler_state._prompt import PromptIdentity

__all__ = ["SchedulerState"]


@final
class SchedulerState:
    """Both records of every request of one engine's scheduler process.

    Not thread-safe: all calls come from the engine's scheduler thread.

    Args:
        config: The engine.
        secrets: Fleet secrets, each of 16 bytes or more: the first one seals this engine's tickets, all verify those of peers;
            none for tickets without seals.
        producer_table: The producer machine; override only in proofs, which mutate it.
        consumer_table: The consumer machine; override only in proofs, which mutate it.
    """

    __slots__ = (
        "_admissions",
        "_clock",
        "_config",
        "_consumers",
        "_endings",
        "_heartbeats",
        "_outbox",
        "_producers",
        "_reports",
        "_requests",
        "_rules",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        secrets: Sequence[bytes] = (),
        producer_table: Table = PRODUCER_TABLE,
        consumer_table: Table = CONSUMER_TABLE,
    ) -> None:
        self._config = config
        self._clock = ObservedClock()
        self._rules = BlockRules(config.groups, config.null_block)
        self._outbox = Outbox()
        self._producers = Producers(config, producer_table, self._rules, self._outbox)
        self._consumers = Consumers(config, consumer_table, self._rules, self._outbox)
        self._heartbeats = self._consumers.heartbeats
        self._requests: dict[str, Request] = {}
        self._reports = Reports(self._requests, self._clock, self._consumers, self._producers)
        self._endings = Endings(self._requests, self._clock, self._consumers, self._producers)
        self._admissions = Admissions(self._requests, self._clock, self._consumers, self._producers, self._reports)
        if secrets:
            self.set_secrets(secrets)

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """Seal and verify tickets with these fleet secrets from now on; the first one seals.

        Raises:
            InvalidConfig: `invalid-config`, for none or a short one; nothing is changed then.
        """
        seal = TicketSeal(secrets, self._config.unsealed_networks)
        self._producers.seal = self._admissions.seal = seal

    @property
    def config(self) -> SchedulerConfig:
        """The engine that this state belongs to."""
        return self._config

    def arrive(
        self,
        request_id: str,
        params: object,
        *,
        prompt_tokens: int,
        identity: PromptIdentity | None = None,
        now_s: float,
    ) -> Admission:
        """Admit a request and return its role; a bad ticket is a value here, never an exception.

        Args:
            request_id: The engine's id of the request.
            params: Its `kv_transfer_params` as the client sent them; never changed.
            prompt_tokens: Length of its prompt.
            identity: Computes the digest of its prompt; without one a ticket that is bound to a prompt is refused.
            now_s: The caller's monotonic clock.

        Raises:
            DuplicateRequest: `duplicate-request`, while a request of that id is live or has orders in the next plan.
            InvalidEvent: `invalid-event`, for an empty id, a negative length or a time that is none.
        """
        return self._admissions.arrive(request_id, params, prompt_tokens, identity, now_s)

    def external_tokens(self, request_id: str, *, computed_tokens: int) -> int | None:
        """Return the prompt tokens to read from the peer beyond the local prefix hit; orders nothing.

        None: another request with the same ticket is reading; ask again in a later step.

        Raises:
            UnknownRequest: `unknown-request`.
            InvalidEvent: `invalid-event`, for a negative count.
        """
        try:
            request = self._requests[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(request_id, "external-tokens") from None
        if type(computed_tokens) is not int or computed_tokens < 0:
            refuse_count("computed_tokens", computed_tokens)
        consumer = request.consumer
        return 0 if consumer is None else self._consumers.external_tokens(consumer, computed_tokens)

    def allocate(
        self,
        request_id: str,
        *,
        block_ids: Sequence[Sequence[int]],
        new_block_ids: Sequence[Sequence[int]],
        external_tokens: int,
        preemptions: int = 0,
        now_s: float,
    ) -> None:
        """Note that the engine gave blocks to a request, and order its read or notification.

        Args:
            request_id: The request.
            block_ids: All its blocks per group, in token order.
            new_block_ids: Those that no prefix hit covers; the read fills them.
            external_tokens: Tokens that the engine expects from the read; above 0 it parks the request.
            preemptions: How often the engine has taken the request's blocks away so far.
            now_s: The caller's monotonic clock.

        Raises:
            UnknownRequest: `unknown-request`.
            IllegalTransition: `illegal-transition`, for instance on a second read.
            InvalidEvent: `invalid-event`, for a wrong number of groups or more tokens than the peer holds. With external
                tokens, the parked request is then among the `failures` of the next plan, unless a read is under way.
        """
        try:
            request = self._find(request_id, "allocate")
            consumer, producer = request.consumer, request.producer
            if type(external_tokens) is not int or external_tokens < 0:
                refuse_count("external_tokens", external_tokens)
            if type(preemptions) is not int or preemptions < 0:
                refuse_count("preemptions", preemptions)
            at_s = self._clock.observe(now_s)
            if consumer is not None:
                if producer is not None:
                    self._producers.require_allocation(request_id, producer, preemptions)
                self._consumers.allocate(request_id, consumer, block_ids, new_block_ids, external_tokens, at_s)
            elif external_tokens:
                raise InvalidEvent(
                    f"request {quote(request_id)} expects {external_tokens} external tokens without a ticket"
                )
            if producer is not None:
                self._producers.allocate(request_id, producer, preemptions, at_s)
        except SchedulerStateError:
            self._reports.fail_parked(request_id, external_tokens)
            raise

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
        blocks = self._rules.chunk(new_block_ids)
        self._producers.scheduled(request_id, producer, row, blocks, self._clock.observed_s)

    def preempt(self, request_id: str, *, now_s: float) -> None:
        """Note that the engine took a request's blocks away and will start it again.

        Raises:
            UnknownRequest: `unknown-request`.
            IllegalTransition: `illegal-transition`, while a read is running.
            InvalidEvent: `invalid-event`.
        """
        request = self._find(request_id, "preempt")
        preempt(request_id, request, self._consumers, self._producers, self._clock.observe(now_s))

    def finish(
        self,
        request_id: str,
        *,
        reason: FinishReason,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        withhold: bool = False,
        identity: PromptIdentity | None = None,
        now_s: float,
    ) -> FinishDecision:
        """End a request and decide whether its blocks are handed over.

        Args:
            request_id: The request.
            reason: "length" and "stop" hand over; "abort" and "error" do not.
            block_ids: Its blocks per group, in token order.
            computed_tokens: Tokens whose KV these blocks hold for good; tokens of a step that still runs do not count.
            withhold: Whether to keep the ticket back although the request ended well.
            identity: Computes the digest that binds the ticket to the prompt; without one the ticket is bound to none.
            now_s: The caller's monotonic clock.

        Raises:
            UnknownRequest: `unknown-request`; among others for a second end.
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`, for an unknown reason or a wrong number of groups.
        """
        return self._endings.finish(request_id, reason, block_ids, computed_tokens, withhold, identity, now_s)

    def report(self, *, sent: Sequence[str], received: Sequence[str], failed: Sequence[str]) -> None:
        """Note the reports of the workers after a step.

        Args:
            sent: Producer requests whose lease has ended on every worker.
            received: Consumer requests whose read has ended on every worker.
            failed: Consumer requests whose read failed on some worker; they may, but need not be in `received` too. Requests of
                a plan's `failures` come back here.

        Raises:
            UnknownRequest: `unknown-request`; like the other, only after every legal id has been applied, for the first that
                was not.
            IllegalTransition: `illegal-transition`.
        """
        self._reports.apply(sent, received, failed)

    def take_step_plan(self, *, now_s: float) -> StepPlan:
        """Return all orders since the last call.

        Raises:
            InvalidEvent: `invalid-event`; the orders stay for the next call.
        """
        at_s = self._clock.observe(now_s)
        heartbeats = self._heartbeats
        if heartbeats.next_due_s <= at_s:
            self._outbox.renew(heartbeats.take_due(at_s))
        return self._outbox.take() if self._outbox.has_orders else EMPTY_PLAN

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
        return len(self._requests)

    @property
    def fence_slots_used(self) -> int:
        """Fence slots in use; with all of `config.fence_slots` in use nothing is handed over."""
        return self._producers.fences.used

    @property
    def lease_count(self) -> int:
        """Leases that are out: granted, and not reported as `sent` yet."""
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
        """Hand nothing over from now on: prompts end with the code `draining`. Leases that are out live on, reads go on."""
        self._producers.is_draining = True

    def relieve(self, *, now_s: float) -> bool:
        """Revoke the oldest lease under memory pressure, one at a time; True while blocks are about to be freed.

        Raises:
            InvalidEvent: `invalid-event`.
        """
        return self._producers.relieve(self._clock.observe(now_s))

    def revoke(self, request_id: str, *, now_s: float) -> None:
        """End a lease early; the blocks are free once the workers report the request as sent.

        Raises:
            UnknownRequest: `unknown-request`, also for a request that is no producer.
            IllegalTransition: `illegal-transition`, for a request without a lease.
        """
        producer = self._find(request_id, "revoke").producer
        if producer is None:
            raise UnknownRequest(request_id, "revoke")
        row = self._producers.table.find(request_id, producer.state, "revoke")
        self._producers.revoke(request_id, producer, row, self._clock.observe(now_s))

    def set_generation(self, generation: int | None) -> None:
        """Name this generation of the engine's memory registration in tickets from now on; None names none.

        Raises:
            InvalidEvent: `invalid-event`, for a number that no consumer would accept.
        """
        self._producers.set_generation(generation)

    def reset(self, *, now_s: float) -> None:
        """Void all KV that was computed or promised before now. Costs a scan.

        Leases are revoked. A prompt that is being computed is handed over only if it is preempted and started again. Tickets
        whose read has not been ordered are given up: their producers are told, and the prompts are computed here. Reads
        under way are in the next plan's `voids`: they must end badly, for their pages hold KV from before.

        Raises:
            InvalidEvent: `invalid-event`.
        """
        at_s = self._clock.observe(now_s)
        void_all(self._requests, self._consumers, self._producers, at_s)

    def snapshot(self, *, now_s: float, most: int | None = None) -> tuple[dict[str, object], ...]:
        """Return live requests with age, states, traces and the event that each waits for, oldest first; `most` of them.

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
