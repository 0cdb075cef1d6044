"""The step plan: all orders of one scheduler step.

A plan is a plain immutable value that can be pickled. `WorkerState.apply` returns the part that a worker must carry out, in this
order: the words of `streams` before anything may write a freed block, `fences` (words are written at once), `LeaseTable.apply`
(expects, grants, releases, revokes), then reads, cancels, voids and heartbeats; saves and completes as soon as the step's blocks
are computed; failures with the next report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from kv_scheduler_state.ticket.ticket import HandoffTicket, PeerAddress
    from kv_scheduler_state.values import BlockIds, BlockList

__all__ = [
    "EMPTY_PLAN",
    "EMPTY_STREAM_PLAN",
    "FenceOrder",
    "GrantOrder",
    "HeartbeatOrder",
    "ReadOrder",
    "StepPlan",
    "StreamChunk",
    "StreamOpen",
    "StreamOrder",
    "StreamPlan",
    "StreamRun",
    "StreamVoid",
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
        passes: The part of `cancels` whose hand-over another request will read: the peer must not be told that it is done.
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
