"""The connector in the scheduler's process: hooks in, decisions of the request machines out. Plain values on both sides.

Loads without vLLM: `host/connector.py` turns the host's objects into the values that these methods take.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, final

from vllm_adapter.observe.cause_log import CauseLog
from vllm_adapter.observe.recorder import Recorder
from vllm_adapter.observe.spans import TraceLinks
from vllm_adapter.scheduler.chunks import PrefillChunks
from vllm_adapter.scheduler.holdings import Holdings
from vllm_adapter.scheduler.hooks import HookGuards
from vllm_adapter.scheduler.pending import AwaitedReports, Shortage
from vllm_adapter.scheduler.registration import ServedRegistration
from vllm_adapter.scheduler.streams import Streaming
from vllm_adapter.scheduler.tickets import TicketLog, TicketSeals
from vllm_adapter.scheduler.trail import Trail
from vllm_adapter.steps import StepOrders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.config.secrets import FleetSecrets
    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.ports import Admission, BlockIds, FinishDecision, HandshakeListener, SchedulerState
    from vllm_adapter.scheduler.chunks import ScheduledTokens
    from vllm_adapter.scheduler.hooks import Arrival, Ending
    from vllm_adapter.scheduler.streams import AskService
    from vllm_adapter.steps import Rank, StepReport, TraceLink

__all__ = ["SchedulerSide"]

_REST_S: Final = 0.005
"""Longest wait of a step that computes nothing while whole prompts are read, here or from here; else vLLM takes a thousand
such steps a second."""
_REST_OF_STREAMS_S: Final = 0.01
"""The same while nothing but prompts is read that peers still compute."""
_SESSION: Final = "the request is a session whose prompt comes in parts, and only whole prompts are handed over"


@final
class SchedulerSide:
    """Drives the request machines from the scheduler's hooks and serves this engine's metadata to peers.

    No hook raises: a refusal of the machines is logged, and the request goes on without a hand-over. A request that the host
    has already parked for a read that was then refused is among the failures of the next plan, so it never hangs.

    Args:
        facts: This engine.
        state: The request machines.
        listener: The side channel's listener, not yet started.
        secrets: The fleet's secrets; None if tickets are not sealed.
        asks: Sends questions to peers; None for an engine that does not stream.
        now_s: The monotonic clock.
        lease_ended: Called with (link, request id, Unix time of the grant in ns) at the end of a traced lease.
        is_ending: Tells whether the host was told to end; from then on no ticket is given, and open leases go on.
    """

    def __init__(
        self,
        facts: EngineFacts,
        state: SchedulerState,
        listener: HandshakeListener,
        *,
        secrets: FleetSecrets | None = None,
        asks: AskService | None = None,
        now_s: Callable[[], float] = time.monotonic,
        lease_ended: Callable[[TraceLink, str, int], None] | None = None,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._facts = facts
        self._state = state
        self._now_s = now_s
        self._stats = Recorder()
        self._seals = TicketSeals(secrets, state)
        self._guards = HookGuards(CauseLog(now_s))
        self._streams: Streaming | None = None
        if asks is not None and state.streams is not None:
            self._streams = Streaming(
                facts,
                state.streams,
                asks,
                listener,
                self._guards,
                secrets=lambda: self._seals.current,
                log=CauseLog(now_s),
                count=lambda code: self._stats.observe("unstreamed_codes", code),
            )
        self._served = ServedRegistration(facts, listener)
        self._chunks = PrefillChunks(
            facts.groups, facts.context_sizes, state, self._guards, has_mirror=facts.is_mirrored
        )
        self._links = TraceLinks(lease_ended) if lease_ended is not None else None
        self._awaited = AwaitedReports(self._stats, CauseLog(now_s))
        self._tickets = TicketLog(self._stats, CauseLog(now_s))
        self._holdings = Holdings(facts, state, is_ending)
        self._trail = Trail(self._stats.hand_overs, now_s)
        self._shortage = Shortage()
        self._free_blocks: Callable[[], int] = int  # none, as far as is known
        self._followed: set[str] = set()
        # Steps without work in a row, while some of this side waits for the workers.
        self._empty_steps = 0
        # Arrivals that the machines refused: they know nothing of these requests, or another one by that id.
        self._not_admitted: set[str] = set()

    @property
    def group_ids(self) -> tuple[int, ...]:
        """Numbers of the transferable groups among all of the scheduler's."""
        return self._facts.group_ids

    @property
    def span_tokens(self) -> tuple[int, ...]:
        """Tokens that a block of each transferable group stands for; 0 for a group of states."""
        return self._chunks.span_tokens

    # ---------------------------------------------------------------------------------------------- requests

    def arrived(self, arrival: Arrival) -> None:
        """Admit a request; a refused ticket means local prefill, or an error if that is impossible, and a logged reason."""
        request_id, params = arrival.request_id, arrival.params
        self._not_admitted.add(request_id)
        with self._guards("arrival", request_id):
            now_s = self._now_s()
            self._seals.look(now_s)
            if arrival.is_session and params:
                # Source: vLLM tells connectors of a session's first part alone. Later parts extend the prompt and write into its
                # blocks.
                self._tickets.refused(request_id, "ticket-session", _SESSION)
                params = None
            admission = self._state.arrive(
                request_id, params, prompt_tokens=arrival.prompt_tokens, identity=arrival.identity, now_s=now_s
            )
            self._not_admitted.discard(request_id)
            if self._links is not None:
                self._links.arrived(request_id, arrival.trace_headers)
            if admission.rejected_code:
                code, message = admission.rejected_code, admission.rejected_message
                self._tickets.refused(request_id, code, message, is_producer=admission.role == "producer")
            if admission.role != "none":
                self._followed.add(request_id)
                self._trail.arrived(arrival, admission.role, now_s, is_early=admission.is_early)
                if not admission.rejected_code:
                    self._seals.accepted(params)
                    if self._streams is not None:
                        self._streams.admitted(arrival)
            elif self._state.must_fail(request_id):
                self._followed.add(request_id)
            self._begin_prompt(arrival, admission)

    def _begin_prompt(self, arrival: Arrival, admission: Admission) -> None:
        """Drop the tokens that the consumer computes from the end of a producer's prompt, and follow it."""
        tail = admission.truncate_tokens
        is_shortened = bool(tail) and arrival.drop_tail is not None and arrival.drop_tail(tail)
        if tail and not is_shortened:
            self._tickets.not_shortened(arrival.request_id)
        if admission.role == "producer":
            if admission.is_early and self._streams is not None:
                self._streams.check_whole(arrival, tail=tail, is_shortened=is_shortened)
            tokens = arrival.prompt_tokens - tail * is_shortened
            self._chunks.watch(arrival.request_id, tokens, is_early=admission.is_early)

    def follows(self, request_id: str) -> bool:
        """Return whether the request takes part in a hand-over; the calls for all others change nothing."""
        return request_id in self._followed

    def computes(self, request_id: str) -> bool:
        """Return whether `build_step` is to be told what steps compute of the request."""
        return self._chunks.follows(request_id)

    def external_tokens(self, request_id: str, computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load beyond the local prefix hit, and whether they load between steps.

        None: another request with the same ticket is being read, or its peer has not offered the prompt yet, or there is no
        room for it; ask again in a later step.
        """
        tokens: int | None = 0
        if request_id in self._followed:
            # An offer that has come since the last step saves this one.
            if self._streams is not None:
                self._streams.receive(self._now_s())
            with self._guards("prefix lookup", request_id):
                tokens = self._state.external_tokens(request_id, computed_tokens=computed_tokens)
        self._shortage.told(tokens)
        return tokens, bool(tokens)

    def reads_nothing(self) -> tuple[int, bool]:
        """Return the answer about a prompt that the host computes whole, which waits for blocks like any other."""
        self._shortage.told(0)
        return 0, False

    def must_fail(self, request_id: str) -> bool:
        """Return whether the host must end the request with an error, because it lacks a part of the prompt."""
        return request_id in self._followed and self._state.must_fail(request_id)

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
        self._shortage.allocated(request_id)
        self._trail.allocated(request_id, external_tokens=external_tokens)
        with self._guards("allocation", request_id):
            if self._state.streams is not None:
                self._state.streams.produced.gives_offers = self._served.is_sure
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
        if request_id in self._not_admitted:
            self._not_admitted.discard(request_id)
            return False, None
        self._holdings.look()
        decision = self._end(ending, block_ids)
        if self._streams is not None:
            self._streams.publish()
        if request_id in self._followed:
            self._followed.discard(request_id)
            if ending.reason == "error":
                self._awaited.erred(request_id)
            self._shortage.finished(request_id)
            self._trail.finished(request_id)
        self._chunks.forget(request_id)
        if self._links is not None:
            self._links.finished(request_id, keeps_blocks=decision is not None and decision.keep_blocks)
        if decision is None:
            return False, None
        if decision.keep_blocks:
            self._awaited.leased(request_id)
        if decision.withheld_code:
            self._tickets.withheld(request_id, decision.withheld_code)
        return decision.keep_blocks, dict(decision.params) if decision.params is not None else None

    def _end(self, ending: Ending, block_ids: BlockIds) -> FinishDecision | None:
        """End a request in the machines; None if they refuse even the end of a request that failed."""
        request_id = ending.request_id
        with self._guards("end", request_id):
            return self._state.finish(
                request_id,
                reason=ending.reason,
                block_ids=self._transferable(block_ids),
                computed_tokens=ending.kept_tokens,
                withhold=self._must_withhold(ending),
                identity=ending.identity,
                now_s=self._now_s(),
            )
        # The host frees the blocks, at once or when the words of a stream have moved, so the request ends here, too.
        with self._guards("end without a hand-over", request_id):
            return self._state.finish(request_id, reason="error", block_ids=[], computed_tokens=0, now_s=self._now_s())
        return None

    def _must_withhold(self, ending: Ending) -> bool:
        """Return whether the ticket must be kept back.

        That is so while the current registration is unknown, after a chunk of the prompt was refused, and if a running state has
        seen tokens that are not kept: a state cannot be set back.
        """
        has_run_on = self._facts.has_state and ending.kept_tokens < ending.computed_tokens
        return not self._served.is_sure or self._chunks.was_refused(ending.request_id) or has_run_on

    # ---------------------------------------------------------------------------------------------- steps

    def build_step(
        self, preempted: Iterable[str], scheduled: Iterable[ScheduledTokens], *, is_empty: bool = False
    ) -> StepOrders:
        """Return the orders of this step for the workers.

        Args:
            preempted: Requests that were preempted since the last step.
            scheduled: Tokens that the step computes for requests that it `computes`; not looked at while there are none.
            is_empty: Whether the step computes nothing for any request.
        """
        now_s = self._now_s()
        self._holdings.look()
        for request_id in preempted:
            if request_id in self._followed:
                with self._guards("preemption", request_id):
                    self._state.preempt(request_id, now_s=now_s)
        self._chunks.take(scheduled)
        if self._holdings.is_revoking:
            with self._guards("revocation of all leases", consequence="they end when they are read or expire"):
                self._holdings.revoke(now_s)
        streams = self._streams
        if streams is not None:
            streams.receive(now_s)
        plan = self._state.take_step_plan(now_s=now_s)
        if streams is not None:
            # An answer may reach its asker before the workers have stored the words that it names: older words show no progress.
            streams.send()
        self._awaited.ordered(plan)
        self._trail.ordered(plan, now_s)
        if plan.heartbeats:
            self._stats.observe("heartbeat_delay", self._state.heartbeat_delay_s)
        self._empty_steps = self._empty_steps + 1 if is_empty else 0
        is_lacking = self._state.streams is not None and self._state.streams.consumed.lacks_blocks
        is_roomy = is_empty and 2 * self._free_blocks() > self._facts.block_count
        if self._shortage.lasts(now_s, is_empty=is_empty, streams_lack_blocks=is_lacking, is_roomy=is_roomy):
            self._give_way(now_s)
        links = self._links.of_reads(plan) if self._links is not None else {}
        return StepOrders(plan, links, self._served.question, self._rest_s, self._is_asking)

    @property
    def _is_asking(self) -> bool:
        """Whether a question to a peer is still unanswered."""
        return self._streams is not None and self._streams.is_asking

    @property
    def _rest_s(self) -> float:
        """Time that the workers may wait in this step for the end of a read or of a lease."""
        # Ranks that step together would wait with this one, and some of them compute.
        if self._facts.is_lock_stepped:
            return 0.0
        # A single step that computes nothing may stand between two that do, where the host schedules ahead.
        if self._empty_steps < 2 or not (self._awaited.is_awaiting or self._is_asking):
            return 0.0
        return _REST_S if self._awaited.is_awaiting_whole or self._is_asking else _REST_OF_STREAMS_S

    def _give_way(self, now_s: float) -> None:
        """Give up a waiting read if this engine and a peer may each wait for blocks that are leased to the other."""
        with self._guards("giving up a read", consequence="requests that wait for blocks go on waiting"):
            request_id = self._state.give_way(now_s=now_s)
            if request_id:
                self._tickets.gave_way(request_id, self._state.lease_count, self._holdings.leased_blocks)

    def update_output(self, report: StepReport) -> None:
        """Take in the workers' report of a step; ids of other connectors beside this one may be among its own."""
        if report.registrations:
            with self._guards("registration", consequence="peers cannot meet this engine; restart it"):
                self._served.update(report.registrations)
                if self._served.is_sure:
                    self._state.set_generation(self._served.generation)
        if self._streams is not None:
            self._streams.ended(report.stream_ends)
        sent, ended, broken = self._awaited.take(report)
        if sent or ended:
            with self._guards("report of the workers", consequence="blocks may stay until their leases end"):
                self._state.report(sent=sent, received=ended, failed=broken)
            if self._streams is not None:
                self._streams.publish()
            self._trail.reported(sent, "freed")
            self._trail.reported(ended, "reported")
            self._shortage.loaded(self._followed.intersection(ended).difference(broken))
        if self._links is not None:
            self._links.sent(sent)
        self._awaited.log_failures(broken, self._followed)

    # ---------------------------------------------------------------------------------------------- the engine

    def reset_cache(self) -> bool:
        """Void all KV that was computed, promised or ordered before now; True if nothing of it will be handed over or used.

        Until the workers have reported the registration that they have, no prompt is handed over: the host may be about to sleep.
        """
        self._served.doubt()
        with self._guards("reset", consequence="KV of before it may still be handed over; restart this engine"):
            self._state.reset(now_s=self._now_s())
            return True
        return False

    def bind_free_blocks(self, free_blocks: Callable[[], int]) -> None:
        """Ask this for the free blocks of the host's pool before a stream takes some, and where a request seems to lack some."""
        self._free_blocks = free_blocks
        if self._state.streams is not None:
            self._state.streams.consumed.free_blocks = free_blocks

    def take_stats(self) -> dict[str, list[Any]] | None:
        """Return the observations since the last call by key, None for nothing."""
        self._trail.step_ended()
        self._holdings.record(self._stats, self._now_s())
        return self._stats.take()

    def serve(self, envelopes: Mapping[Rank, bytes], ranks: Iterable[Rank] | None = None) -> None:
        """Serve the ranks' envelopes to peers; a port that cannot be bound stops the engine here, with the reason.

        Args:
            envelopes: Envelopes that have arrived, by rank.
            ranks: All ranks, None for those of `envelopes`. The others are asked with the next step, and no prompt is handed
                over until they have answered.
        """
        self._served.serve(envelopes, envelopes if ranks is None else ranks)

    def status(self) -> Answer:
        """Return what this engine holds, as plain values; any thread."""
        holdings = self._holdings.describe(self._now_s())
        return {**holdings, "served_ranks": self._served.rank_count, "seals": list(self._seals.fingerprints)}

    def revoke_leases(self) -> Answer:
        """Revoke all leases with the next step; return how many there are and what they keep, as plain values; any thread."""
        return {"part": "scheduler", "engine_id": self._facts.engine_id, **self._holdings.ask_to_revoke()}

    def hand_overs(self) -> Answer:
        """Return the moments of this engine's latest hand-overs in this process, as plain values; any thread."""
        log = self._stats.hand_overs
        return {"part": "scheduler", "engine_id": self._facts.engine_id, "hand_overs": log.describe()}

    def close(self) -> None:
        """Stop serving; idempotent."""
        if self._streams is not None:
            self._streams.close()
        self._served.close()
        self._holdings.end()

    def _transferable(self, block_ids: BlockIds) -> tuple[Sequence[int], ...]:
        """Return the block ids of the transferable groups."""
        return tuple([block_ids[group_id] for group_id in self._facts.group_ids])
