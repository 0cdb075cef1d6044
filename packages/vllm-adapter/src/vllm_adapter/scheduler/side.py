"""The connector in the scheduler's process: hooks in, decisions of the request machines out. Plain values on both sides.

Loads without vLLM: `host/connector.py` turns the host's objects into the values that these methods take.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from vllm_adapter.observe.recorder import Recorder
from vllm_adapter.observe.trace_links import TraceLinks
from vllm_adapter.scheduler.awaited import AwaitedReports
from vllm_adapter.scheduler.draining import Draining
from vllm_adapter.scheduler.prefill_chunks import PrefillChunks
from vllm_adapter.scheduler.refusals import Refusals
from vllm_adapter.scheduler.served_registration import ServedRegistration
from vllm_adapter.scheduler.ticket_seals import TicketSeals
from vllm_adapter.steps import StepOrders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.ports import BlockIds, FinishDecision, HandshakeListener, PromptIdentity
    from vllm_adapter.scheduler.prefill_chunks import ScheduledTokens
    from vllm_adapter.steps import RankRegistration, TraceLink
    from vllm_adapter.wiring import SchedulerParts

__all__ = ["Arrival", "Ending", "SchedulerSide"]

# A child of the host's logger, so that its format and level apply.
_logger = logging.getLogger("vllm.vllm_adapter")
_COUNTED_ONLY = frozenset(("draining", "lease-quota"))
"""Reasons to give no ticket that concern all requests for a time: no line for each."""
_COUNT_EVERY_S = 1.0
"""Live requests are counted by a scan, so not every step."""

Rank = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has just arrived.

    Attributes:
        request_id: The request.
        params: Its `kv_transfer_params`, as the client sent them.
        prompt_tokens: Length of its prompt.
        identity: Computes the digest of its prompt.
        trace_headers: Trace headers that it came with, if any.
        drop_tail: Takes so many tokens off the end of its prompt; False if that was not possible.
    """

    request_id: str
    params: object
    prompt_tokens: int
    identity: PromptIdentity | None = None
    trace_headers: Mapping[str, str] | None = None
    drop_tail: Callable[[int], bool] | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a request.

    Attributes:
        request_id: The request.
        reason: Cause of its end.
        computed_tokens: Tokens that it has computed, those of steps that still run included.
        in_flight_tokens: Tokens of steps that still run: nobody knows yet whether they are kept.
        identity: Computes the digest of its prompt.
    """

    request_id: str
    reason: Literal["length", "stop", "abort", "error"]
    computed_tokens: int
    in_flight_tokens: int = 0
    identity: PromptIdentity | None = None


@final
class SchedulerSide:
    """Drives the request machines from the scheduler's hooks and serves this engine's metadata to peers.

    No hook raises: a refusal of the machines is logged, and the request goes on without a hand-over. A request that the host
    has already parked for a read that was then refused is among the failures of the next plan, so it never hangs.

    Args:
        facts: This engine.
        parts: Makes the concrete parts.
        now_s: The monotonic clock.
        lease_ended: Called with (link, request id, Unix time of the grant in ns) at the end of a traced lease.
        is_ending: Tells whether the host was told to end; from then on no ticket is given, and open leases go on.
    """

    def __init__(
        self,
        facts: EngineFacts,
        parts: SchedulerParts,
        now_s: Callable[[], float] = time.monotonic,
        *,
        lease_ended: Callable[[TraceLink, str, int], None] | None = None,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._facts = facts
        self._state = parts.make_state()
        self._seals = TicketSeals(parts.make_fleet_secrets(), self._state)
        self._make_listener = parts.make_listener
        self._listener: HandshakeListener | None = None
        self._now_s = now_s
        self._chunks = PrefillChunks(facts.groups, facts.context_sizes) if parts.uses_host_buffer else None
        self._links = TraceLinks(lease_ended)
        self._served = ServedRegistration(facts.generation)
        self._awaited = AwaitedReports()
        self._stats = Recorder()
        self._draining = Draining(facts, self._state, is_ending)
        self._counted: Mapping[str, int] = {}
        self._counted_s = -_COUNT_EVERY_S
        self._followed: set[str] = set()
        self._unsaved: set[str] = set()

    @property
    def group_ids(self) -> tuple[int, ...]:
        """Numbers of the transferable groups among all of the scheduler's."""
        return self._facts.group_ids

    # ---------------------------------------------------------------------------------------------- requests

    def arrived(self, arrival: Arrival) -> None:
        """Admit a request; a refused ticket means local prefill and one logged reason."""
        request_id = arrival.request_id
        with Refusals("arrival", request_id):
            self._seals.look(self._now_s())
            admission = self._state.arrive(
                request_id,
                arrival.params,
                prompt_tokens=arrival.prompt_tokens,
                identity=arrival.identity,
                now_s=self._now_s(),
            )
            self._links.arrived(request_id, arrival.trace_headers)
            if admission.rejected_code:
                self._stats.observe("ticket_refusal_codes", admission.rejected_code)
                _logger.warning(
                    "request %s: its hand-off ticket is refused and the prompt computed here (%s: %s)",
                    request_id,
                    admission.rejected_code,
                    admission.rejected_message,
                )
            if admission.role != "none":
                self._followed.add(request_id)
            if admission.role != "none" and not admission.rejected_code:
                self._seals.accepted(arrival.params)
            tail = admission.truncate_tokens
            if tail and not (arrival.drop_tail is not None and arrival.drop_tail(tail)):
                _logger.warning("request %s: its prompt could not be shortened for the hand-off", request_id)
                tail = 0
            if self._chunks is not None and admission.role == "producer":
                self._chunks.watch(request_id, arrival.prompt_tokens - tail)

    def follows(self, request_id: str) -> bool:
        """Return whether the request takes part in a hand-over; the calls for all others change nothing."""
        return request_id in self._followed

    def external_tokens(self, request_id: str, computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load beyond the local prefix hit, and whether they load between steps.

        None: another request with the same ticket is being read; ask again in a later step.
        """
        tokens: int | None = 0
        if request_id in self._followed:
            with Refusals("prefix lookup", request_id):
                tokens = self._state.external_tokens(request_id, computed_tokens=computed_tokens)
        return tokens, bool(tokens)

    def allocated(
        self,
        request_id: str,
        block_ids: BlockIds,
        new_block_ids: BlockIds,
        *,
        external_tokens: int,
        preemptions: int,
    ) -> None:
        """Note the blocks that the scheduler gave to a request.

        Args:
            request_id: The request.
            block_ids: All its blocks, per group of the scheduler.
            new_block_ids: Those that no prefix hit covers, alike.
            external_tokens: Tokens that the host expects from the read; above 0 it has parked the request.
            preemptions: How often the host has preempted the request so far.
        """
        with Refusals("allocation", request_id):
            self._state.allocate(
                request_id,
                block_ids=self._transferable(block_ids),
                new_block_ids=self._transferable(new_block_ids),
                external_tokens=external_tokens,
                preemptions=preemptions,
                now_s=self._now_s(),
            )

    def finished(self, ending: Ending, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Decide whether a finished request's blocks stay for a peer, and what its response says."""
        request_id = ending.request_id
        decision: FinishDecision | None = None
        self._draining.look()
        with Refusals("end", request_id):
            decision = self._state.finish(
                request_id,
                reason=ending.reason,
                block_ids=self._transferable(block_ids),
                # Tokens of a step that still runs may be rejected drafts.
                computed_tokens=max(0, ending.computed_tokens - ending.in_flight_tokens),
                withhold=self._must_withhold(ending),
                identity=ending.identity,
                now_s=self._now_s(),
            )
        self._followed.discard(request_id)
        self._unsaved.discard(request_id)
        if self._chunks is not None:
            self._chunks.forget(request_id)
        self._links.finished(request_id, keeps_blocks=decision is not None and decision.keep_blocks)
        if decision is None:
            # The host frees the blocks, so the request ends here, too.
            with Refusals("end without a hand-over", request_id):
                self._state.finish(request_id, reason="error", block_ids=[], computed_tokens=0, now_s=self._now_s())
            return False, None
        if decision.keep_blocks:
            self._awaited.leased(request_id)
        if decision.withheld_code:
            self._stats.observe("withheld_ticket_codes", decision.withheld_code)
            if decision.withheld_code not in _COUNTED_ONLY:
                _logger.warning("request %s: its prompt is not handed over (%s)", request_id, decision.withheld_code)
        return decision.keep_blocks, dict(decision.params) if decision.params is not None else None

    def _must_withhold(self, ending: Ending) -> bool:
        """Return whether the ticket must be kept back.

        Nobody knows the current registration; or a copy to the mirror was refused; or a running state has seen tokens of a
        step that still runs, and it cannot be set back.
        """
        has_run_on = self._facts.has_state and ending.in_flight_tokens > 0
        return not self._served.is_sure or ending.request_id in self._unsaved or has_run_on

    # ---------------------------------------------------------------------------------------------- steps

    def build_step(self, preempted: Iterable[str], scheduled: Iterable[ScheduledTokens]) -> StepOrders:
        """Return the orders of this step for the workers.

        Args:
            preempted: Requests that were preempted since the last step.
            scheduled: Tokens that the step computes; only read in host-buffer mode.
        """
        now_s = self._now_s()
        self._draining.look()
        for request_id in preempted:
            if request_id in self._followed:
                with Refusals("preemption", request_id):
                    self._state.preempt(request_id, now_s=now_s)
        if self._chunks is not None:
            self._order_saves(self._chunks, scheduled)
        plan = self._state.take_step_plan(now_s=now_s)
        self._awaited.ordered(plan)
        if plan.heartbeats:
            self._stats.observe("heartbeat_delay", self._state.heartbeat_delay_s)
        return StepOrders(plan, self._links.of_reads(plan), self._served.question)

    def _order_saves(self, chunks: PrefillChunks, scheduled: Iterable[ScheduledTokens]) -> None:
        """Order this step's copies to the mirror (host-buffer mode)."""
        for step in scheduled:
            chunk = chunks.scheduled(step)
            if chunk is None:
                continue
            # Until the machine has accepted the copy, the prompt must not be handed over.
            is_new = step.request_id not in self._unsaved
            self._unsaved.add(step.request_id)
            with Refusals("copy to the mirror", step.request_id):
                self._state.scheduled(
                    chunk.request_id, new_block_ids=chunk.block_ids, is_prompt_complete=chunk.is_prompt_complete
                )
                if is_new:
                    self._unsaved.discard(step.request_id)

    def has_pending_block_frees(self) -> bool:
        """Return whether blocks are about to be freed by a lease that ends; order the oldest back if none is."""
        with Refusals("request for blocks", "(none)"):
            return self._state.relieve(now_s=self._now_s())
        return False

    def update_output(
        self,
        *,
        sent: Iterable[str],
        received: Iterable[str],
        failed: Iterable[str],
        registrations: Mapping[Rank, RankRegistration] | None = None,
        reasons: Mapping[str, Mapping[Rank, str]] | None = None,
    ) -> None:
        """Take in the workers' reports of a step; ids of other connectors beside this one may be among them.

        Args:
            sent: Requests whose blocks nobody needs any more.
            received: Requests whose load has ended, well or badly.
            failed: Those that ended badly.
            registrations: What ranks have registered.
            reasons: Why reads failed, by request and rank.
        """
        if registrations:
            with Refusals("registration", "(none)"):
                self._registered(registrations)
        if reasons:
            self._awaited.explained(reasons)
        sent_ids = self._awaited.sent(sent)
        ended, broken = self._awaited.received(received, failed)
        if sent_ids or ended:
            with Refusals("report of the workers", "(several)"):
                self._state.report(sent=sent_ids, received=ended, failed=broken)
        self._links.sent(sent_ids)
        self._log_failures(broken)

    def _log_failures(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            reason = self._awaited.take_reason(request_id)
            if reason:
                _logger.error(
                    "request %s: its KV was not taken over %s; kv_load_failure_policy decides what becomes of it",
                    request_id,
                    reason,
                )

    def _registered(self, registrations: Mapping[Rank, RankRegistration]) -> None:
        """Serve the registration that the workers have now."""
        envelopes = self._served.heard(registrations)
        if self._served.is_sure:
            self._state.set_generation(self._served.generation)
        if envelopes is not None and self._listener is not None:
            self._listener.replace(envelopes)
            _logger.info("side channel of engine %s serves %d ranks anew", self._facts.engine_id, len(envelopes))

    # ---------------------------------------------------------------------------------------------- the engine

    def reset_cache(self) -> bool:
        """Void all KV that was computed, promised or ordered before now; True if nothing of it will be handed over or used.

        Until the workers have reported the registration that they have, no prompt is handed over: the host may be about to sleep.
        """
        self._served.doubt()
        with Refusals("reset", "(all)"):
            self._state.reset(now_s=self._now_s())
            return True
        return False

    def take_stats(self) -> dict[str, list[Any]] | None:
        """Return the observations since the last call by key, None for nothing."""
        now_s = self._now_s()
        if now_s - self._counted_s >= _COUNT_EVERY_S:
            self._counted_s, before, counts = now_s, self._counted, self._state.state_counts()
            self._counted = counts
            changes = {state: counts.get(state, 0) - before.get(state, 0) for state in {*before, *counts}}
            if any(changes.values()):
                self._stats.observe("live_requests", changes)
            self._stats.level("fence_slots_used", self._state.fence_slots_used)
        self._stats.level("leased_blocks", self._draining.leased_blocks)
        self._stats.level("leased_bytes", self._draining.leased_bytes)
        return self._stats.take()

    def serve(self, envelopes: Mapping[Rank, bytes], ranks: Iterable[Rank] | None = None) -> None:
        """Serve the ranks' envelopes to peers; a port that cannot be bound stops the engine here, with the reason.

        Args:
            envelopes: What is there of them.
            ranks: All ranks, None for those of `envelopes`. The others are asked with the next step, and no prompt is handed
                over until they have answered.
        """
        expected = frozenset(envelopes if ranks is None else ranks)
        self._served.expect(expected)
        if not expected <= envelopes.keys():
            self._served.doubt()
        if self._listener is not None:
            self._listener.replace(envelopes)
            return
        listener = self._make_listener()
        listener.replace(envelopes)
        listener.start()
        self._listener = listener
        _logger.info(
            "side channel of engine %s serves %d ranks on port %d", self._facts.engine_id, len(envelopes), listener.port
        )

    def close(self) -> None:
        """Stop serving; idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        self._draining.end()

    def _transferable(self, block_ids: BlockIds) -> tuple[Sequence[int], ...]:
        """Return the block ids of the transferable groups."""
        return tuple([block_ids[group_id] for group_id in self._facts.group_ids])
