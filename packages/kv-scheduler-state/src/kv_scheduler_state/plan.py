"""The step plan: all orders of one scheduler step, and the outbox that collects them; questions and answers of streams.

A plan is a plain immutable value that can be pickled. `WorkerState.apply` returns the part that a worker must carry out, in this
order: the words of `streams` before anything may write a freed block, `fences` (words are written at once), `LeaseTable.apply`
(expects, grants, releases, revokes), then reads, cancels, voids and heartbeats; saves and completes as soon as the step's blocks
are computed; failures with the next report.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, final

if TYPE_CHECKING:
    from kv_scheduler_state.ticket.ticket import HandoffTicket, PeerAddress
    from kv_scheduler_state.values import BlockIds, BlockList

__all__ = [
    "EMPTY_PLAN",
    "EMPTY_STREAM_PLAN",
    "FenceOrder",
    "GrantOrder",
    "HeartbeatOrder",
    "NoReason",
    "Outbox",
    "ReadOrder",
    "StepPlan",
    "StreamAnswer",
    "StreamChunk",
    "StreamOpen",
    "StreamOrder",
    "StreamOutcome",
    "StreamPart",
    "StreamPlan",
    "StreamQuestion",
    "StreamResult",
    "StreamRun",
    "StreamStanding",
    "StreamVoid",
    "VOID_TOKENS",
]


@final
class ReadOrder(NamedTuple):
    """A request's read, or the notification that replaces it.

    Attributes:
        request_id: The local request.
        ticket: The peer's promise: its address, its blocks, its fence. Of a streamed read it names no blocks.
        local_blocks: Blocks to fill, per group. All without ids: nothing to read, only notify the peer.
        tokens: Prompt tokens that the local KV holds after the read; blocks beyond are not filled.
        is_reported: Whether the engine waits for the end of this order. True even without blocks, if the engine parked
            the request before it was aborted.
    """

    request_id: str
    ticket: HandoffTicket
    local_blocks: tuple[BlockList, ...]
    tokens: int
    is_reported: bool

    @property
    def is_notify_only(self) -> bool:
        """Whether there is nothing to read."""
        return not any(blocks.ids for blocks in self.local_blocks)


@final
class HeartbeatOrder(NamedTuple):
    """Leases of one peer engine that are to be renewed now.

    Attributes:
        peer: Engine that holds the blocks.
        readers: (request id there, nonce of the grant) pairs, oldest first, each once.
    """

    peer: PeerAddress
    readers: tuple[tuple[str, str], ...]


@final
class FenceOrder(NamedTuple):
    """A fence word to write before the request's blocks can be read."""

    request_id: str
    slot: int
    generation: int


@final
class GrantOrder(NamedTuple):
    """A lease of `lease_s` seconds that starts now, on the worker's clock; `nonce` names it in notifications."""

    request_id: str
    lease_s: float
    fence: tuple[int, int] | None
    nonce: str = ""


@final
class StreamRun(NamedTuple):
    """Block ids for the table of a slot, at its places from `first` on, see `StreamTable`."""

    first: int
    ids: tuple[int, ...]


@final
class StreamOpen(NamedTuple):
    """Order: store a generation, reset the progress, and give the table to this tag; before the forward pass."""

    request_id: str
    slot: int
    generation: int
    tag: int


@final
class StreamVoid(NamedTuple):
    """Order: void the fence word before the forward pass, which may write freed blocks. `ends`: report it as sent."""

    request_id: str
    slot: int
    word: int
    tag: int
    ends: bool


@final
class StreamChunk(NamedTuple):
    """Order: put block ids into the table before the forward pass, and show `tokens` once the device has finished it."""

    request_id: str
    slot: int
    tag: int
    runs: tuple[StreamRun, ...]
    tokens: int
    held_tokens: int = 0
    """Tokens whose pages are complete once the device has finished all steps before this one; 0 if none are known."""


@final
class StreamOrder(NamedTuple):
    """Order: read behind a peer's progress word.

    `read` is the whole read without the peer's blocks, which its table lists. `start` is the first token to read.
    """

    read: ReadOrder
    tag: int
    start: int


@final
class StreamPlan(NamedTuple):
    """Orders of one step; those of one request apply in the order of these fields, those of several requests in any order.

    A producer's worker applies `voids`, `opens` and `chunks` before the forward pass; a consumer's worker applies `ends`,
    `watches` and `stops` with its reads. `ends`: forget these streams. `stops`: stop reading, and report the request as received
    and failed once its reads are quiet; a stream that this worker has read to the end is not reported as received again.
    """

    voids: tuple[StreamVoid, ...] = ()
    opens: tuple[StreamOpen, ...] = ()
    chunks: tuple[StreamChunk, ...] = ()
    ends: tuple[str, ...] = ()
    watches: tuple[StreamOrder, ...] = ()
    stops: tuple[str, ...] = ()


EMPTY_STREAM_PLAN: Final = StreamPlan()


StreamResult: TypeAlias = Literal["read-whole", "computed-here", "given-up", "fails"]
NoReason: TypeAlias = Literal["digest-mismatch", "unknown-id", "withdrawn", "busy", "not-streamed"]

VOID_TOKENS: Final = (1 << 32) - 1
"""Progress of a tag that was voided: more than any prompt has."""


class StreamOutcome(NamedTuple):
    """Decision against streaming a prompt that came with an early ticket."""

    request_id: str
    code: str
    """`no-room`: no blocks were free in time. `over-share`: it needs more blocks than all streams together may hold.
    `other-blocks`: the peer's blocks have another size. `no-answer`: the peer was silent. `nothing-to-read`: the engine must
    compute the prompt itself. `too-many`: too many requests with an early ticket. Otherwise a `NoReason`, or the code of the
    ticket or the question that failed."""
    result: StreamResult
    """`read-whole`: the final ticket is asked for. `given-up`: after a stream that broke; the failure policy decides.
    `fails`: its images came to the peer alone, see `SchedulerState.must_fail`."""
    host: str
    port: int
    hand_over_id: str


class StreamQuestion(NamedTuple):
    """Question of a consumer about a hand-over id. The answer repeats `number`, so late answers can be distinguished."""

    request_id: str
    """The consumer's own request; means nothing to the peer."""
    number: int
    host: str
    port: int
    hand_over_id: str
    digest: str
    """Digest of the consumer's own prompt, see `prompt_digest`."""
    tokens: int
    """Tokens under the digest."""
    wants_final: bool
    """Whether only the final ticket is of use, because its streams broke too often."""


class StreamAnswer(NamedTuple):
    """Answer to the asker of a question: `{"kind": "offer" | "final" | "no", ...}`, made of builtins only."""

    asker: str
    number: int
    answer: dict[str, object]


class StreamStanding(NamedTuple):
    """Standing answer to every further question for an id, whatever the engine does meanwhile; None withdraws it.

    It holds only for questions with this digest, since all others are about another prompt; an empty digest matches any. An
    offer does not answer a question that wants the final ticket.
    """

    hand_over_id: str
    digest: str
    answer: dict[str, object] | None


class StreamPart(NamedTuple):
    """Order: read the table's entries `first` to `stop - 1`, and the states and windows as well if `is_last`."""

    first: int
    stop: int
    is_last: bool


@final
class StepPlan(NamedTuple):
    """All orders of one scheduler step, each part in the order in which the scheduler decided it.

    Attributes:
        reads: Reads and notifications to start.
        expects: Producer requests whose readers may report before the grant.
        fences: Fence words to write, before anything else of the same request.
        grants: Leases that start.
        releases: Producer requests that will not be handed over after all; the engine has freed them already.
        revokes: Producer requests whose lease ends now; the engine waits for them to be reported as sent.
        restarts: Producer requests whose prompt is computed from the beginning again; each has a new word in `fences`.
        saves: (request id, blocks per group) to copy to host memory in this step.
        completes: Requests whose prompt is complete with this step's saves.
        heartbeats: Leases at peers to renew.
        cancels: Requests whose running read is no longer wanted; the engine still waits for its end.
        passes: The part of `cancels` whose hand-over another request will read: the peer must not be notified that it is done.
        voids: Requests whose read, already ordered, must fail, because the cache was reset.
        failures: Requests that the engine parked for a read that will not happen; report them as received and failed.
        streams: Orders of streamed hand-overs.
    """

    reads: tuple[ReadOrder, ...] = ()
    expects: tuple[str, ...] = ()
    fences: tuple[FenceOrder, ...] = ()
    grants: tuple[GrantOrder, ...] = ()
    releases: tuple[str, ...] = ()
    revokes: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    saves: tuple[tuple[str, BlockIds], ...] = ()
    completes: tuple[str, ...] = ()
    heartbeats: tuple[HeartbeatOrder, ...] = ()
    cancels: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    voids: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    streams: StreamPlan = EMPTY_STREAM_PLAN

    @property
    def is_empty(self) -> bool:
        """Whether the step orders nothing at all."""
        return self == EMPTY_PLAN

    @property
    def is_local(self) -> bool:
        """Whether the step orders nothing of the transfer thread: it may store words of streams, and copy to host memory."""
        words = self.streams
        has_reads = words.ends or words.watches or words.stops
        return not has_reads and self == StepPlan(saves=self.saves, completes=self.completes, streams=words)


EMPTY_PLAN: Final = StepPlan()
"""The plan of a step in which nothing happened."""


@final
class Outbox:
    """Collects a step's orders until `take` returns them; an aborted request's orders may be withdrawn before.

    Args:
        hold_steps: Plans for which a read that fills blocks is kept back, with its void.

    Attributes:
        orders: The parts of a `StepPlan`, each by request (heartbeats: by peer); an order replaces one of the same request.
        streams: The parts of its `StreamPlan`, likewise.
    """

    def __init__(self, hold_steps: int = 0) -> None:
        self._hold_steps = hold_steps
        # Plans for which each waiting read is still kept back.
        self._young: dict[str, int] = {}
        self.orders: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        self.streams: defaultdict[str, dict[Any, Any]] = defaultdict(dict)

    def read(self, order: ReadOrder, *, fills_blocks: bool = False) -> None:
        """Order a read, or replace the one that waits."""
        self.orders["reads"][order.request_id] = order
        if self._hold_steps:
            self._young[order.request_id] = self._hold_steps if fills_blocks else 0

    def announce(self, part: str, request_id: str, fence: tuple[int, int] | None) -> None:
        """Announce a producer request (`expects`) or its new start (`restarts`), with its fence if it has one."""
        self.orders[part][request_id] = request_id
        if fence is not None:
            self.orders["fences"][request_id] = FenceOrder(request_id, *fence)

    def withdraw(self, request_id: str) -> None:
        """Drop the waiting orders of a producer request; release it if the workers know of it."""
        is_unknown = request_id in self.orders["expects"]
        for part in ("expects", "fences", "restarts", "saves", "completes"):
            self.orders[part].pop(request_id, None)
        if not is_unknown:
            self.orders["releases"][request_id] = request_id

    def is_ending(self, request_id: str) -> bool:
        """Whether the previous request of this id still ends in the next plan, so that the id cannot be used again yet."""
        orders, streams = self.orders, self.streams
        if not orders and not streams:
            return False
        last_orders = orders["reads"], orders["releases"], orders["failures"], streams["ends"], streams["stops"]
        return any(request_id in part for part in last_orders)

    @property
    def has_orders(self) -> bool:
        """Whether any order waits."""
        return any(self.orders.values()) or any(self.streams.values())

    def take(self) -> StepPlan:
        """Return all waiting orders that are due, in the order in which they were decided, and clear them."""
        if not self.orders and not self.streams:
            return EMPTY_PLAN
        kept = self._held_back() if self._young else None
        parts = {name: tuple(part.values()) for name, part in self.orders.items() if part}
        if "saves" in parts:
            parts["saves"] = tuple([save for saves in parts["saves"] for save in saves])
        self.orders.clear()
        if kept is not None:
            self.orders.update(kept)
        streams = EMPTY_STREAM_PLAN
        if self.streams:
            streams = StreamPlan(**{name: tuple(part.values()) for name, part in self.streams.items() if part})
            self.streams.clear()
        return StepPlan(**parts, streams=streams) if parts or any(streams) else EMPTY_PLAN

    def _held_back(self) -> dict[str, dict[str, Any]]:
        """Take out the reads that are kept back, with their voids, which mean nothing before them."""
        reads, voids = self.orders["reads"], self.orders["voids"]
        young = {name: left for name, left in self._young.items() if left and name in reads}
        self._young = {name: left - 1 for name, left in young.items()}
        kept_voids = {name: voids.pop(name) for name in young if name in voids}
        return {"reads": {name: reads.pop(name) for name in young}, "voids": kept_voids}
