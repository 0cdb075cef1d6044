"""Requests that take part in a hand-over: from their arrival to the last report of the workers.

Beside other connectors (vLLM's MultiConnector) each connector receives the reports of all of them; ids that are not awaited
here belong to another connector.

The scheduler counts and logs a failed read, the ranks do not, because the scheduler knows whether the request still wanted it.

The moments of each hand-over are kept for `vllm-adapter trace`. The first token has no hook of its own. After each step vLLM
asks for statistics; while a request that was taken over waits for its first token, and only then, its tokens are counted there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

from vllm_adapter.observe.hand_overs import short_id
from vllm_adapter.steps import TraceLink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import PromptIdentity, StepPlan
    from vllm_adapter.steps import ReadFailure, StepReport

__all__ = ["Arrival", "Ending", "FollowedRequest", "FollowedRequests"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has just arrived.

    Attributes:
        request_id: The request.
        params: Its `kv_transfer_params`, as the client sent them.
        prompt_tokens: Length of its prompt.
        identity: Computes the digest of its prompt.
        trace_headers: Trace headers of the request, if any.
        drop_tail: Drops the given number of tokens from the end of its prompt; returns False if that was not possible.
        frontend_s: Time since the host's frontend began to process it; None if that is not known.
        output_tokens: Returns the number of tokens generated so far.
        max_tokens: Most tokens that it may generate; None if that is not known.
        is_session: Whether its prompt comes in parts, each sent after the answer to the previous part.
        is_computed_whole: Whether the host computes all of its prompt, as for a client that wants the prompt's logprobs.
        end_with_error: Lets the host end it with an error, whatever its policy for failed reads is.
        block_hashes: Returns the host's hashes of its whole blocks.
    """

    request_id: str
    params: object
    prompt_tokens: int
    identity: PromptIdentity
    trace_headers: Mapping[str, str] | None = None
    drop_tail: Callable[[int], bool] = lambda _tokens: False
    frontend_s: float | None = None
    output_tokens: Callable[[], int] = int
    max_tokens: int | None = None
    is_session: bool = False
    is_computed_whole: bool = False
    end_with_error: Callable[[], None] = lambda: None
    block_hashes: Callable[[], Sequence[Any]] = list


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a request.

    The computed tokens that belong to the conversation are those of which a ticket may be given: tokens of a step that still runs
    may be rejected drafts, and those behind a stop token were accepted, but are not part of the answer. Example: 48 tokens are
    computed, 4 of them in flight, and the answer ends with token 42: 42 are kept.

    Attributes:
        request_id: The request.
        reason: Reason of its end.
        computed_tokens: Tokens computed so far, including those of steps that are still running.
        in_flight_tokens: Tokens of steps that are still running: it is not known yet whether they will be kept.
        identity: Computes the digest of its prompt.
        known_tokens: Tokens of the prompt and its answer; None if that is not known. More were computed if the answer ends inside
            an accepted draft.
    """

    request_id: str
    reason: Literal["length", "stop", "abort", "error"]
    computed_tokens: int
    in_flight_tokens: int = 0
    identity: PromptIdentity = field(kw_only=True)
    known_tokens: int | None = None


@dataclass(slots=True)
class FollowedRequest:
    """A live request that takes part in a hand-over.

    Attributes:
        arrival: The request as it arrived.
        role: Its role; "none" for one that must fail.
        is_early: Whether it came with an early ticket.
        link: Its trace; None without tracing.
    """

    arrival: Arrival
    role: Literal["producer", "consumer", "none"]
    is_early: bool = False
    link: TraceLink | None = None


@final
class FollowedRequests:
    """Live requests, awaited reads and open leases. Scheduler's thread only.

    Args:
        recorder: Remembers the moments of hand-overs, and counts and logs reads that failed.
        now_s: The monotonic clock.
        lease_ended: Called with (link, request id, Unix time of the grant in ns) at the end of a traced lease; None without
            tracing.
        after_failure: Consequence of a failed read for its request, in words.

    Attributes:
        live: Requests that the host has not ended, by id.
        loaded: Live requests whose read succeeded, and which wait for the step that computes the rest.
        reads: Reads in progress, with whether the peer still computes the prompt.
        leases: Traces of the requests whose blocks are kept for a reader, with the Unix time of the grant in ns.
    """

    def __init__(
        self,
        recorder: Recorder,
        now_s: Callable[[], float],
        lease_ended: Callable[[TraceLink, str, int], None] | None,
        after_failure: str = "",
    ) -> None:
        self._recorder = recorder
        self._after_failure = after_failure
        self._moments = recorder.hand_overs
        self._now_s = now_s
        self._lease_ended = lease_ended
        self.live: dict[str, FollowedRequest] = {}
        self.loaded: set[str] = set()
        # Counters of generated tokens, of requests that wait for their first one.
        self._starting: dict[str, Callable[[], int]] = {}
        self.reads: dict[str, bool] = {}
        # Reads that the request machines refused after the host had parked their requests.
        self._refused: set[str] = set()
        # Those of `reads` whose request the host has ended with an error since the latest step. Under the policy "fail" it does
        # so for a failed read, before it passes on the report of that read.
        self._erred: set[str] = set()
        # Failures of ranks, by request; a read is reported once all other ranks have ended, too.
        self._failures: defaultdict[str, list[ReadFailure]] = defaultdict(list)
        self.leases: dict[str, tuple[TraceLink | None, int]] = {}

    def begin(self, arrival: Arrival, role: Literal["producer", "consumer"], now_s: float, *, is_early: bool) -> None:
        """Follow a request from its arrival; `is_early`: it came with an early ticket."""
        request_id = arrival.request_id
        request = self.live[request_id] = FollowedRequest(arrival, role, is_early)
        facts: dict[str, object] = {"is_early": True} if is_early else {}
        facts |= {"frontend_s": arrival.frontend_s, "tokens": arrival.prompt_tokens}
        self._moments.mark(request_id, "arrived", now_s, role=role, **facts)
        if self._lease_ended is not None and arrival.trace_headers:
            request.link = TraceLink(dict(arrival.trace_headers), time.time_ns())

    def allocated(self, request_id: str, *, is_read: bool) -> None:
        """Note blocks that were allocated: for a read, or for the step that computes the rest."""
        self.loaded.discard(request_id)
        self._moments.mark(request_id, "allocated" if is_read else "scheduled", self._now_s())
        request = self.live.get(request_id)
        if request is not None and request.role == "consumer" and not is_read:
            self._starting[request_id] = request.arrival.output_tokens

    def ordered(self, plan: StepPlan, now_s: float) -> dict[str, TraceLink]:
        """Note the reads and failures that a step orders; return the traces of these reads, by request."""
        self._erred.clear()
        if not (plan.reads or plan.failures or plan.streams.watches):
            return {}
        self._refused.update(plan.failures)
        links: dict[str, TraceLink] = {}
        streamed = [(order.read, True) for order in plan.streams.watches]
        for order, is_streamed in [*((order, False) for order in plan.reads if order.is_reported), *streamed]:
            request_id = order.request_id
            self.reads[request_id] = is_streamed
            self._moments.mark(
                request_id,
                "ordered",
                now_s,
                peer_engine_id=order.ticket.peer.engine_id,
                peer_request_id=short_id(order.ticket.peer_request_id),
                is_streamed=is_streamed,
            )
            request = self.live.get(request_id)
            if request is not None and request.link is not None:
                links[request_id] = request.link
        return links

    def take(self, report: StepReport) -> tuple[list[str], list[str], list[str]]:
        """Return the awaited ids of a report, sorted: leases that have ended, reads that have ended, and those that failed."""
        if not (self.reads or self.leases or self._refused):
            return [], [], []
        for failure in report.failures:
            if failure.request_id in self.reads:
                self._failures[failure.request_id].append(failure)
        sent = sorted(self.leases.keys() & set(report.sent))
        ended = sorted((self.reads.keys() | self._refused) & set(report.received))
        failed = [request_id for request_id in ended if request_id in report.failed]
        for request_id in sent:
            self._moments.mark(request_id, "freed", self._now_s())
            link, granted_ns = self.leases.pop(request_id)
            if link is not None and self._lease_ended is not None:
                self._lease_ended(link, request_id, granted_ns)
        for request_id in ended:
            self._moments.mark(request_id, "reported", self._now_s())
            self.reads.pop(request_id, None)
            self._refused.discard(request_id)
            if request_id in failed:
                self._note_failure(request_id)
            elif request_id in self.live:
                self.loaded.add(request_id)
        return sent, ended, failed

    def _note_failure(self, request_id: str) -> None:
        failures = self._failures.pop(request_id, [])
        if not failures:
            return
        if request_id in self.live or request_id in self._erred:
            self._note_lost(request_id, failures)
            return
        # Its client left, or the host aborted it. That is no failure, whatever the ranks' reasons are: a peer may also be lost
        # while the cancelled read leaves the wire.
        self._recorder.observe("num_cancelled_reads", "request-ended")
        self._recorder.info("request-ended", "request %s: its read was cancelled, as the request had ended", request_id)

    def _note_lost(self, request_id: str, failures: Sequence[ReadFailure]) -> None:
        """Count and log a failed read, with the reason of each rank; reads with the same codes share a rate limit."""
        codes = sorted({failure.code for failure in failures})
        self._recorder.observe("num_failed_reads", failures[0].code)
        ranks: defaultdict[str, list[str]] = defaultdict(list)
        for failure in sorted(failures, key=lambda one: one.rank):
            pp_rank, tp_rank = failure.rank
            ranks[failure.text].append(f"{pp_rank}.{tp_rank}")
        # For example: by ranks 0.0, 0.1 from request p1 of engine P: timed out; by rank 0.2 from ...
        reasons = [f"by rank{'s' * (len(of) > 1)} {', '.join(of)} from {reason}" for reason, of in ranks.items()]
        self._recorder.error(
            " ".join(codes),
            "request %s: its KV was not taken over %s; %s",
            request_id,
            "; ".join(reasons),
            self._after_failure,
        )

    def step_ended(self) -> None:
        """Note first tokens; to be called after each step."""
        if not self._starting:
            return
        for request_id in [request_id for request_id, count in self._starting.items() if _is_started(count)]:
            del self._starting[request_id]
            self._moments.mark(request_id, "first_token", self._now_s())

    def finished(self, request_id: str, *, is_error: bool, keeps_blocks: bool) -> None:
        """Note the end of a request, whose blocks may be kept for a reader."""
        request = self.live.pop(request_id, None)
        self.loaded.discard(request_id)
        count = self._starting.pop(request_id, None)
        if is_error and request_id in self.reads:
            self._erred.add(request_id)
        if keeps_blocks:
            self.leases[request_id] = (request.link if request is not None else None, time.time_ns())
        if request is not None and request.role == "producer":
            self._moments.mark(request_id, "answered", self._now_s())
        elif count is not None and _is_started(count):
            self._moments.mark(request_id, "first_token", self._now_s())


def _is_started(count: Callable[[], int]) -> bool:
    """Return whether a request has its first token; a fault of the host's count loses a moment, and fails no step."""
    try:
        return count() > 0
    except Exception:  # noqa: BLE001 - the host's code
        return False
