"""The connector in the scheduler's process: hooks in, decisions of the request machines out. Plain values on both sides.

Loads without vLLM: `host/connector.py` turns the host's objects into the values that these methods take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast, final

from vllm_adapter.observe.recorder import Guard, Recorder
from vllm_adapter.scheduler.ahead import ReadAhead
from vllm_adapter.scheduler.chunks import FollowedPrompt, PrefillChunks
from vllm_adapter.scheduler.followed import FollowedRequest, FollowedRequests
from vllm_adapter.scheduler.holdings import Holdings
from vllm_adapter.scheduler.registration import ServedRegistration
from vllm_adapter.scheduler.shortage import Shortage
from vllm_adapter.steps import SHORT_READS, SHORT_REST_S, StepOrders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.config.secrets import FleetSecrets
    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.ports import Admission, BlockIds, FinishDecision, HandshakeListener, SchedulerState, StepPlan
    from vllm_adapter.scheduler.ahead import FreeBlocks, ReadsHere
    from vllm_adapter.scheduler.chunks import ScheduledTokens
    from vllm_adapter.scheduler.followed import Arrival, Ending
    from vllm_adapter.scheduler.streams import Streaming
    from vllm_adapter.steps import Rank, StepReport, TraceLink

__all__ = ["SchedulerSide"]

_logger = logging.getLogger("vllm.vllm_adapter")
_MEDIA_MISSING: Final = "ticket-media-missing"
_COUNTED_ONLY: Final = frozenset(("draining", "lease-quota"))
"""Reasons to withhold a ticket that apply to all requests for a time: they are counted, not logged for each request."""
_OF_AN_ENGINE: Final = "ticket-mode"
"""Refusal that concerns all tickets of an engine, which its message names: it is logged once for each engine."""
_REST_S: Final = 0.005
"""Longest wait of an empty step while whole prompts are read, here or from here; else vLLM takes a thousand a second."""
_REST_OF_STREAMS_S: Final = 0.01
"""The same while nothing but prompts is read that peers still compute."""
_SHORT_RESTS: Final = 40
"""Empty steps behind an order or a grant in which that wait is `SHORT_REST_S`, since no arrival ends it."""
_IDLE_STEPS: Final = 2
"""Steps in a row that compute nothing, of an engine that does not just wait for the output of steps in flight."""
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
        streaming: Returns the streamed hand-overs that this recorder observes; None for an engine that does not stream.
        now_s: The monotonic clock.
        lease_ended: Called with (link, request id, Unix time of the grant in ns) at the end of a traced lease.
        is_ending: Returns whether the host was asked to end; from then on no ticket is given, and open leases go on.

    Attributes:
        admitted: Live requests that the request machines know. Those without params never arrive here.
        followed: Those of them that take part in a hand-over, by id; the calls for all others change nothing.
        chunks: Prompts of which `build_step` needs the tokens that steps compute.
        ahead: Reads of short prompts while the host asks for them; None if this engine makes none.
        lacks_blocks: Whether the host has asked for a request since its last step or allocation. The caller clears it when the
            host gives blocks, to any request.
    """

    def __init__(
        self,
        facts: EngineFacts,
        state: SchedulerState,
        listener: HandshakeListener,
        *,
        secrets: FleetSecrets | None = None,
        streaming: Callable[[Recorder], Streaming] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        lease_ended: Callable[[TraceLink, str, int], None] | None = None,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._facts = facts
        self._state = state
        self._secrets = secrets
        self._now_s = now_s
        self._is_ending = is_ending
        self._recorder = Recorder(now_s=now_s)
        self._streams = streaming(self._recorder) if streaming is not None else None
        if secrets is not None:
            state.set_secrets(secrets.current)
        self._served = ServedRegistration(facts, listener)
        self.chunks = PrefillChunks(facts, state, self._recorder)
        self._requests = FollowedRequests(self._recorder, now_s, lease_ended, facts.after_failure)
        self.followed = self._requests.live
        self._holdings = Holdings(facts, state)
        self._shortage = Shortage(state, self._recorder, self._holdings)
        self._free_blocks: Callable[[], int] = int  # none, as far as is known
        # Steps without work in a row since the latest order or grant.
        self._empty_steps = 0
        self.lacks_blocks = False
        self.ahead: ReadAhead | None = None
        self.admitted: set[str] = set()
        self._has_moved = False  # whether anything has happened since the latest levels

    # ---------------------------------------------------------------------------------------------- requests

    def arrived(self, arrival: Arrival) -> None:
        """Admit a request; a refused ticket means local prefill, or an error if that is impossible, and a logged reason."""
        request_id, params = arrival.request_id, arrival.params
        with Guard(self._recorder, "arrival", request_id):
            now_s = self._now_s()
            if self._secrets is not None and self._secrets.changed(now_s):
                self._state.set_secrets(self._secrets.current)
            if arrival.is_session and params:
                # Source: vLLM tells connectors of a session's first part alone. Later parts extend the prompt and write into its
                # blocks.
                self._note_refusal(arrival, "ticket-session", _SESSION)
                params = None
            admission = self._state.arrive(
                request_id, params, prompt_tokens=arrival.prompt_tokens, identity=arrival.identity, now_s=now_s
            )
            self.admitted.add(request_id)
            code, is_producer = admission.rejected_code, admission.role == "producer"
            if code:
                self._note_refusal(arrival, code, admission.rejected_message, is_producer=is_producer)
            elif admission.role == "consumer" or _has_ticket(params):
                self._recorder.count("num_requests")
            if admission.role == "none":
                return
            self._requests.begin(arrival, admission.role, now_s, is_early=admission.is_early)
            if not code and self._secrets is not None:
                self._note_unsealed(params)
            if not code and self._streams is not None:
                self._streams.admitted(arrival)
            if is_producer:
                self._begin_prompt(arrival, admission)
            elif self.ahead is not None:
                self.ahead.arrived(self.followed[request_id])

    def _note_refusal(self, arrival: Arrival, code: str, message: str, *, is_producer: bool = False) -> None:
        """Count and log a refused ticket; end the request with an error if its prompt cannot be computed here.

        The refusal of a producer's ticket costs it the stream or the readback alone.
        """
        self._recorder.count("num_requests")
        self._recorder.observe("num_refused_tickets", code)
        log, cause = self._recorder.warning, code
        outcome = "its hand-over ticket is refused and the prompt computed here"
        if code == _MEDIA_MISSING:
            log, outcome = self._recorder.error, "it ends with an error, whatever the policy"
            # Again when the host asks for its tokens, because the host overrules this for a prompt that it computes whole.
            self.followed[arrival.request_id] = FollowedRequest(arrival, "none")
            arrival.end_with_error()
        elif is_producer:
            cause = f"producer-{code}"
            outcome = "its ticket is refused, so its prompt is computed here and handed over whole"
        elif code == _OF_AN_ENGINE and not self._recorder.is_first(code, message):
            return
        log(cause, "request %s: %s: %s (%s)", arrival.request_id, outcome, message, code)

    def _note_unsealed(self, params: object) -> None:
        """Log once per peer that its tickets have no seal; for params that an engine with fleet secrets has accepted."""
        if not isinstance(params, Mapping):
            return
        ticket = cast("Mapping[str, object]", params)
        # A plain request to prefill names no blocks.
        if ticket.get("kv_seal") is not None or not ticket.get("remote_block_ids"):
            return
        peer = str(ticket.get("remote_engine_id"))[:80], str(ticket.get("remote_host"))[:80]
        if self._recorder.is_first("unsealed", *peer):
            _logger.warning(
                "engine %r at %s hands over without seals, as unsigned_hosts allows: a client can make up tickets for it",
                *peer,
            )

    def _begin_prompt(self, arrival: Arrival, admission: Admission) -> None:
        """Drop the tokens that the consumer computes from the end of a producer's prompt, and follow it."""
        tail = admission.truncate_tokens
        is_shortened = bool(tail) and arrival.drop_tail(tail)
        if tail and not is_shortened:
            self._recorder.warning(
                "tail-not-shortened",
                "request %s: its last prompt tokens, which the decode engine computes, could not be left out here",
                arrival.request_id,
            )
        if admission.is_early and self._streams is not None:
            self._streams.check_whole(arrival, tail=tail, is_shortened=is_shortened)
        if admission.is_early or self._facts.is_mirrored:
            tokens = arrival.prompt_tokens - tail * is_shortened
            self.chunks.prompts[arrival.request_id] = FollowedPrompt(tokens)

    def external_tokens(self, request_id: str, computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load beyond the local prefix hit, and whether they load between steps.

        None: another request with the same ticket is being read, or its peer has not offered the prompt yet, or there is no
        room for it, so ask again in a later step; or the request is to end with an error.
        """
        tokens: int | None = 0
        is_later = False
        request = self.followed.get(request_id)
        if request is not None and not request.arrival.is_computed_whole:
            # An offer that has come since the last step saves this one.
            if self._streams is not None:
                self._streams.receive(self._now_s())
            with Guard(self._recorder, "prefix lookup", request_id):
                tokens = self._state.external_tokens(request_id, computed_tokens=computed_tokens)
                is_later = bool(tokens)
                if not tokens and self._state.must_fail(request_id):
                    request.arrival.end_with_error()
                    tokens = None
                elif self.ahead is not None:
                    wanted, tokens, is_later = tokens, 0, False  # computed here if this fails
                    is_beside, now_s = not self._empty_steps, self._now_s()
                    tokens, is_later = self.ahead.external_tokens(
                        request, computed_tokens, wanted, is_beside=is_beside, now_s=now_s
                    )
        self.lacks_blocks = tokens is not None
        return tokens, is_later

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
        self.lacks_blocks, self._has_moved = False, True
        if self.ahead is not None:
            with Guard(self._recorder, "short read", request_id):
                # Those of a prompt that was read already are not to be read.
                external_tokens *= not self.ahead.allocated(request_id, block_ids, external_tokens)
        self._requests.allocated(request_id, is_read=external_tokens > 0)
        with Guard(self._recorder, "allocation", request_id):
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
        if request_id not in self.admitted:
            return False, None
        self.admitted.discard(request_id)
        self._has_moved = True
        if self.ahead is not None:
            with Guard(self._recorder, "short read", request_id):
                self.ahead.finished(request_id)
        if self._is_ending():
            self._holdings.drain()
        prompt = self.chunks.prompts.pop(request_id, None)
        kept_tokens = max(0, ending.computed_tokens - ending.in_flight_tokens)
        if ending.known_tokens is not None:
            kept_tokens = min(kept_tokens, ending.known_tokens)
        # No ticket while the current registration is unknown, after a chunk of the prompt was refused, and if a running state has
        # seen tokens that are not kept: a state cannot be set back.
        is_spoilt = prompt is not None and prompt.is_refused
        has_run_on = kept_tokens < ending.computed_tokens and self._facts.has_state
        decision: FinishDecision | None = None
        with Guard(self._recorder, "end", request_id):
            decision = self._state.finish(
                request_id,
                reason=ending.reason,
                block_ids=self._transferable(block_ids),
                computed_tokens=kept_tokens,
                withhold=not self._served.is_sure or is_spoilt or has_run_on,
                identity=ending.identity,
                now_s=self._now_s(),
            )
        if decision is None:
            # The host frees the blocks, at once or when the words of a stream have moved, so the request ends here, too.
            with Guard(self._recorder, "end without a hand-over", request_id):
                decision = self._state.finish(
                    request_id,
                    reason="error",
                    block_ids=[],
                    computed_tokens=0,
                    identity=ending.identity,
                    now_s=self._now_s(),
                )
        if self._streams is not None:
            self._streams.publish()
        keeps_blocks = decision is not None and decision.keep_blocks
        self._requests.finished(request_id, is_error=ending.reason == "error", keeps_blocks=keeps_blocks)
        if decision is None:
            return False, None
        code = decision.withheld_code
        if code:
            self._recorder.observe("num_withheld_tickets", code)
            if code not in _COUNTED_ONLY:
                self._recorder.warning(
                    code, "request %s: it gets no ticket, so its reader computes the prompt (%s)", request_id, code
                )
        return keeps_blocks, dict(decision.params) if decision.params is not None else None

    # ---------------------------------------------------------------------------------------------- steps

    def build_step(
        self, preempted: Iterable[str], scheduled: Iterable[ScheduledTokens], *, is_empty: bool = False
    ) -> StepOrders:
        """Return the orders of this step for the workers.

        Args:
            preempted: Requests that were preempted since the last step.
            scheduled: Tokens that the step computes, at least those of the prompts that `chunks` follows.
            is_empty: Whether the step computes nothing for any request.
        """
        now_s = self._now_s()
        if self._is_ending():
            self._holdings.drain()
        preempted = tuple(preempted)
        for request_id in preempted:
            if request_id in self.followed:
                with Guard(self._recorder, "preemption", request_id):
                    self._state.preempt(request_id, now_s=now_s)
        if self.chunks.prompts:
            self.chunks.take(scheduled)
        if self._holdings.is_revoking:
            with Guard(self._recorder, "revocation of all leases", consequence="they end when they are read or expire"):
                self._holdings.revoke(now_s)
        streams = self._streams
        if streams is not None:
            streams.receive(now_s)
        plan = self._state.take_step_plan(now_s=now_s)
        if streams is not None:
            # An answer may reach its asker before the workers have stored the words that it names: older words show no progress.
            streams.send()
        links = self._requests.ordered(plan, now_s)
        if plan.heartbeats:
            self._recorder.observe("heartbeat_delay_seconds", self._state.heartbeat_delay_s)
        self._empty_steps = 0 if not is_empty else 1 if plan.reads or plan.grants else self._empty_steps + 1
        lacks_blocks, self.lacks_blocks = self.lacks_blocks, False
        streams_lack = (
            streams is not None and self._state.streams is not None and self._state.streams.consumed.lacks_blocks
        )
        # The host continues with a prompt that was read without asking again. With half of all blocks free it cannot lack any:
        # the host tells no connector that it is paused, and does not continue with such a prompt then.
        is_full = bool(self._requests.loaded) and 2 * self._free_blocks() <= self._facts.block_count
        is_short = bool(self._empty_steps) and (lacks_blocks or is_full or streams_lack)
        self._shortage.relieve(now_s, is_short=is_short)
        if self.ahead is not None:
            with Guard(self._recorder, "short reads"):
                lacks_blocks = lacks_blocks or bool(preempted)
                self.ahead.step_ended(lacks_blocks=lacks_blocks, is_idle=self._empty_steps > _IDLE_STEPS)
        is_asking = streams is not None and streams.is_asking
        question = 0 if self._served.is_sure else self._served.question
        return StepOrders(plan, links, question, self._rest_s(plan, is_asking=is_asking), is_asking)

    def _rest_s(self, plan: StepPlan, *, is_asking: bool) -> float:
        """Return how long the workers may wait in this step for its own reads or else for any end."""
        facts, reads = self._facts, self._requests.reads
        if facts.is_lock_stepped:  # all its ranks would wait with this one
            return 0.0
        ordered = [order.local_blocks for order in plan.reads if order.is_reported]
        if ordered:
            sizes = [group.block_bytes for group in facts.groups]
            total = sum(len(each.ids) * size for lists in ordered for each, size in zip(lists, sizes, strict=True))
            # The host orders reads behind the forward pass: without a wait they run a step later.
            most_bytes, wait_s = SHORT_READS[not self._empty_steps]
            is_apart = bool(self._empty_steps) or facts.pp == 1  # a next stage would wait as well
            return wait_s * (is_apart and total <= most_bytes)
        # A single step that computes nothing may stand between two that do, where the host schedules ahead.
        if self._empty_steps < 2:
            return 0.0
        if is_asking or self._requests.leases or not all(reads.values()):
            return _REST_S if self._empty_steps > _SHORT_RESTS else SHORT_REST_S
        return _REST_OF_STREAMS_S if reads else 0.0

    def update_output(self, report: StepReport) -> None:
        """Take in the workers' report of a step; ids of other connectors beside this one may be among its own."""
        if report.registrations:
            with Guard(self._recorder, "registration", consequence="peers cannot connect to this engine; restart it"):
                self._served.update(report.registrations)
                if self._served.is_sure:
                    self._state.set_generation(self._served.generation)
        if self._streams is not None:
            self._streams.ended(report.stream_ends)
        sent, ended, failed = self._requests.take(report)
        if sent or ended:
            self._has_moved = True
            with Guard(self._recorder, "report of the workers", consequence="blocks may stay until their leases end"):
                self._state.report(sent=sent, received=ended, failed=failed)
            if self._streams is not None:
                self._streams.publish()

    # ---------------------------------------------------------------------------------------------- the engine

    def reset_cache(self) -> bool:
        """Void all KV that was computed, promised or ordered before now; True if nothing of it will be handed over or used.

        Until the workers have reported the registration that they have, no prompt is handed over: the host may be about to sleep.
        """
        self._served.doubt()
        with Guard(
            self._recorder, "reset", consequence="KV of before it may still be handed over; restart this engine"
        ):
            self._state.reset(now_s=self._now_s())
            if self.ahead is not None:
                self.ahead.reset()
            return True
        return False

    def bind_free_blocks(self, free_blocks: Callable[[], int]) -> None:
        """Ask this for the free blocks of the host's pool before a stream takes some, and where a request seems to lack some."""
        self._free_blocks = free_blocks
        if self._state.streams is not None:
            self._state.streams.consumed.free_blocks = free_blocks

    def read_ahead(self, free: FreeBlocks, here: ReadsHere) -> None:
        """Read short prompts while the host asks for them, into blocks of this pool, by this worker's half."""
        if free.takes_latest_first():
            parts = self._facts, self._state, self._requests, self._recorder
            self.ahead = ReadAhead(*parts, free, here, self.update_output)

    def take_stats(self) -> dict[str, list[Any]] | None:
        """Return the observations since the last call by key, None for nothing."""
        self._requests.step_ended()
        has_moved, self._has_moved = self._has_moved or self._streams is not None, False
        self._holdings.record(self._recorder, self._now_s(), has_moved=has_moved)
        return self._recorder.take()

    def serve(
        self, envelopes: Mapping[Rank, bytes], ranks: Iterable[Rank] | None = None, generation: int | None = None
    ) -> None:
        """Serve the ranks' envelopes to peers; a port that cannot be bound stops the engine here, with the reason.

        Args:
            envelopes: Envelopes that have arrived, by rank.
            ranks: All ranks, None for those of `envelopes`. The others are asked with the next step, and no prompt is handed
                over until they have answered.
            generation: The one of all these registrations; None if they do not tell.
        """
        self._served.serve(envelopes, envelopes if ranks is None else ranks, generation)
        if self._served.is_sure:
            self._state.set_generation(self._served.generation)

    def status(self) -> Answer:
        """Return what this engine holds, as plain values; any thread."""
        holdings = self._holdings.describe(self._now_s())
        seals = self._secrets.fingerprints if self._secrets is not None else ()
        return {**holdings, "served_ranks": len(self._served.ranks), "seals": list(seals)}

    def revoke_leases(self) -> Answer:
        """Revoke all leases with the next step; return how many there are and what they keep, as plain values; any thread."""
        return self._holdings.ask_to_revoke()

    def hand_overs(self) -> Answer:
        """Return the moments of this engine's latest hand-overs in this process, as plain values; any thread."""
        return {"hand_overs": self._recorder.hand_overs.describe()}

    def close(self) -> None:
        """Stop serving; idempotent."""
        if self._streams is not None:
            self._streams.close()
        self._served.close()
        self._holdings.end()

    def _transferable(self, block_ids: BlockIds) -> tuple[Sequence[int], ...]:
        """Return the block ids of the transferable groups."""
        return tuple([block_ids[group_id] for group_id in self._facts.group_ids])


def _has_ticket(params: object) -> bool:
    if not isinstance(params, Mapping):
        return False
    ticket = cast("Mapping[str, object]", params)
    return bool(ticket.get("do_remote_prefill") or ticket.get("remote_block_ids") or ticket.get("kv_stream"))
