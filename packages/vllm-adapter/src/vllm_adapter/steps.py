"""The two messages between the scheduler's process and the workers' processes of one engine: orders down, a report up.

A scheduler step produces one `StepOrders`. A worker answers with one `StepReport`. Both are frozen and can be pickled; vLLM
carries them as its connector's metadata. Within one step orders only go down and reports only go up. Where both halves live in
one process, short reads are ordered and their ends taken in between two steps (`scheduler/ahead.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from vllm_adapter.cache.names import peer_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vllm_adapter.ports import PageNumbers, ReadOrder, StagedRegion, StepPlan

__all__ = [
    "ASLEEP",
    "DEAD",
    "MOST_READS",
    "SHORT_READS",
    "SHORT_REST_S",
    "EndsAhead",
    "STREAM_STOPPED",
    "Rank",
    "RankRegistration",
    "ReadEnd",
    "ReadFailure",
    "ReadTimes",
    "StepOrders",
    "StepReport",
    "TraceLink",
]

ASLEEP: Final = ("asleep", "this engine's cache memory was given back (sleep mode)")
DEAD: Final = ("thread-dead", "the transfer thread of this rank has died; restart this engine")
"""(code, message) of reads that end because nothing is registered."""
STREAM_STOPPED: Final = "stream-stopped"
"""Code of a stream that was given up on this engine's own order."""

SHORT_READS: Final = {False: (8 << 20, 0.002), True: (2 << 20, 0.0005)}
"""Most bytes of reads that the engine's thread waits for, and the longest pause of that wait, 1 to 2 ms in all: in an engine that
computes nothing, and in one that computes, where other requests wait. At 4 to 8 GB/s as many bytes arrive meanwhile."""
MOST_READS: Final = 16
"""Most reads that it makes at once: each takes 0.5 ms, and an arrival waits for all."""
SHORT_REST_S: Final = 0.0015
"""Longest wait of a step that computes nothing soon after an order or a grant. The engine's thread looks for notifications itself
in a wait that is no longer."""

Rank = tuple[int, int]
"""(pp rank, tp rank)."""


@dataclass(frozen=True, slots=True)
class TraceLink:
    """The trace that a request's spans belong to.

    Attributes:
        headers: The trace headers that the request came with (W3C `traceparent`, `tracestate`).
        arrived_ns: Time of its arrival, Unix time in nanoseconds.
    """

    headers: Mapping[str, str]
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class RankRegistration:
    """The memory registration of one rank, as the rank reports it.

    Attributes:
        generation: Number of the registration; the same on all ranks.
        envelope: Bytes that the side channel serves for the rank; None while nothing is registered.
        answer: Number of the last question that the rank has received.
    """

    generation: int
    envelope: bytes | None
    answer: int = 0


@dataclass(frozen=True, slots=True)
class StepOrders:
    """Everything that one step orders from every worker.

    Attributes:
        plan: Orders of the request machines.
        links: Traces that the reads of this step belong to, by request; empty without tracing.
        question: Number of the pending question for the workers' registration; 0 for none.
        rest_s: Time that a worker may wait before it reports: for the ends of all reads that the step orders, where these are
            short, else for any end of a read or of a lease, where the step computes nothing and the engine waits for peers alone.
        is_asking: Whether a question to a peer is open; a worker that waits for nothing of its own may then wait as well.
    """

    plan: StepPlan
    links: Mapping[str, TraceLink] = field(default_factory=dict[str, TraceLink])
    question: int = 0
    rest_s: float = 0.0
    is_asking: bool = False


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """Why a read failed on one rank.

    Attributes:
        request_id: The consumer's request.
        rank: The rank that could not read.
        code: The reason as a code.
        text: Request and place of the producer, and the reason as a sentence.
    """

    request_id: str
    rank: Rank
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything that the workers report after a step: those of one worker, or of all of them.

    vLLM itself merges `sent`, `received` and `failed` of all ranks, and carries the rest beside them.

    Attributes:
        sent: Producer requests whose lease has ended; their fence word is void.
        received: Consumer requests whose read has ended, well or badly.
        failed: The part of `received` that ended badly.
        registrations: Registrations of ranks that were asked for theirs, or have a new one.
        failures: Why reads of `failed` ended badly.
        stream_ends: (request, rank, whether its fence held) of streams that ended.
    """

    sent: Collection[str] = ()
    received: Collection[str] = ()
    failed: Collection[str] = ()
    registrations: Mapping[Rank, RankRegistration] = field(default_factory=dict[Rank, RankRegistration])
    failures: tuple[ReadFailure, ...] = ()
    stream_ends: tuple[tuple[str, Rank, bool], ...] = ()

    def aggregate(self, other: StepReport) -> StepReport:
        """Return both ranks' reports merged, but for the ids that vLLM merges; vLLM calls this."""
        return StepReport(
            registrations={**self.registrations, **other.registrations},
            failures=self.failures + other.failures,
            stream_ends=self.stream_ends + other.stream_ends,
        )


@dataclass(slots=True)
class EndsAhead:
    """Ends of reads, or of leases, that the scheduler half takes in ahead of their report, where both halves share a process.

    With two batches in flight the host takes a step's report in only after it has built the step behind the next one. The worker
    half has reported more ends by then: a request whose pages are complete may run a step earlier, and blocks are free a step
    earlier. Failed reads wait for their own report. Example: step 7 reports a, step 8 b and c, and then the host takes in the
    report of step 7, here with all three. That of step 8 then has none of them: the host expects each end once.

    Attributes:
        reported: Good ends that were reported and not taken in.
        ahead: Ends that were taken in and whose report is still to come.
    """

    reported: set[str] = field(default_factory=set[str])
    ahead: set[str] = field(default_factory=set[str])

    def take(self, ended: set[str]) -> set[str]:
        """Return the ends to take in with a report that has these."""
        ahead, again = self.reported - ended, self.ahead & ended
        self.reported.clear()
        self.ahead = (self.ahead - again) | ahead
        return (ahead | ended) - again


@dataclass(slots=True)
class ReadTimes:
    """Times at which a read reached its stages (seconds, the reader's monotonic clock); None for a stage not reached."""

    ordered_s: float
    posted_s: float | None = None
    """The peer is known and the transfers are posted."""
    data_s: float | None = None
    """The last byte has arrived."""
    fence_s: float = 0.0
    """Seconds that the verification of the slowest fence took after that."""
    bytes_moved: int = 0
    connected_s: float | None = None
    """The peer, which was not known yet, has answered the handshake."""
    planned_s: float | None = None
    """It is planned against, and its lists are prepared."""
    queue_s: float = 0.0
    """Seconds that the transfer which ended last waited for a place on the wire after it was posted."""
    whole_s: float | None = None
    """Of a stream: the producer was seen to have finished the prompt."""
    early_bytes: int | None = None
    """Of a stream: bytes that had arrived by then."""


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """The one end of a request's read, plain or streamed.

    Attributes:
        order: The read order.
        code: Reason of the failure; empty for a good read.
        message: The same as a sentence.
        times: Times of its stages.
        ended_s: Time of the end.
        was_connected: Whether its engine was connected; a handshake that failed is counted as that and as nothing else.
        staged: Regions of a good read whose pages still hold the producer's byte order, with the numbers of these pages.
        is_streamed: Whether it followed the producer's progress. Its end may concern the scheduler half alone.
    """

    order: ReadOrder
    code: str
    message: str
    times: ReadTimes
    ended_s: float
    was_connected: bool = True
    staged: Sequence[tuple[StagedRegion, PageNumbers]] = ()
    is_streamed: bool = False

    @property
    def producer(self) -> str:
        """Request and engine that the blocks were read from, in words."""
        ticket = self.order.ticket
        return f"request {ticket.peer_request_id} of {peer_text(ticket.peer)}"

    @property
    def is_ok(self) -> bool:
        """Whether every page arrived and the lease held."""
        return not self.code

    def failed(self, code: str, message: str) -> ReadEnd:
        """Return a good end as a failed one, because its pages must not be used; a failed end is returned unchanged."""
        return replace(self, code=code, message=message, staged=()) if self.is_ok else self
