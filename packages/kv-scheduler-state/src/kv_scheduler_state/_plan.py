"""The step plan: all orders of one scheduler step.

A plan is a plain immutable value that can be pickled. Workers apply its parts in this order: the words of `streams` before
anything may write a freed block, `AnnouncedFences.apply` (words are written at once), `LeaseTable.apply` (expects, grants,
releases, revokes), then reads, cancels, voids and heartbeats; saves and completes as soon as the step's blocks are computed;
failures with the next report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, final

from kv_scheduler_state._read_order import ReadOrder
from kv_scheduler_state._stream_values import EMPTY_STREAM_PLAN

if TYPE_CHECKING:
    from kv_scheduler_state._blocks import BlockIds
    from kv_scheduler_state._stream_values import StreamPlan
    from kv_scheduler_state._ticket import PeerAddress

__all__ = ["EMPTY_PLAN", "FenceOrder", "GrantOrder", "HeartbeatOrder", "ReadOrder", "StepPlan"]


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
