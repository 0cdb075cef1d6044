"""What one scheduler step tells the workers.

A plan is a plain immutable value (a named tuple, because steps are frequent and those are built fastest): it can be
pickled, and `to_bytes`/`from_bytes` give it a form that does not depend
on this package's classes. Workers apply the parts in this order: expects, fences, grants, releases, revokes (producer
side), then reads, cancels, heartbeats (consumer side); saves whenever the step's blocks are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from kv_scheduler_state._blocks import Blocks
    from kv_scheduler_state._peer import PeerAddress

__all__ = ["EMPTY_PLAN", "FenceOrder", "GrantOrder", "HeartbeatOrder", "ReadOrder", "StepPlan"]


@final
class ReadOrder(NamedTuple):
    """One request's read, or the notification that stands in for it.

    Attributes:
        request_id: The local request.
        peer: Engine to read from.
        peer_request_id: The request's id there; notifications carry this one.
        peer_block_ids: Blocks to read, per group; the tail of a group belongs to the tail of the local one.
        local_block_ids: Blocks to fill, per group. All empty: nothing to read, only notify the peer.
        fence: (slot, generation) to verify after the read, or None if the peer has no fences.
        lease_s: Lease that the ticket announced, or None.
        is_reported: Whether the engine waits for the end of this order. True even without blocks, if the engine parked
            the request before it was aborted.
        external_tokens: Prompt tokens that the read covers.
        local_computed_blocks: Blocks per group in front of `local_block_ids` that a prefix hit covers.
    """

    request_id: str
    peer: PeerAddress
    peer_request_id: str
    peer_block_ids: Blocks
    local_block_ids: Blocks
    fence: tuple[int, int] | None
    lease_s: float | None
    is_reported: bool
    external_tokens: int = 0
    local_computed_blocks: tuple[int, ...] = ()

    @property
    def peer_engine_id(self) -> str:
        """Engine that holds the blocks."""
        return self.peer.engine_id

    @property
    def peer_host(self) -> str:
        """Address of the peer's side channel."""
        return self.peer.host

    @property
    def peer_port(self) -> int:
        """Port of the peer's side channel."""
        return self.peer.port

    @property
    def peer_tp(self) -> int:
        """Tensor-parallel size of the peer."""
        return self.peer.tp

    @property
    def peer_pp(self) -> int:
        """Pipeline-parallel size of the peer."""
        return self.peer.pp

    @property
    def peer_dcp(self) -> int:
        """Decode-context-parallel size of the peer."""
        return self.peer.dcp

    @property
    def peer_generation(self) -> int | None:
        """Registration generation that the ticket was written under, or None."""
        peer = self.peer
        return peer.registration_generation if peer.generation is None else peer.generation

    @property
    def peer_dialect(self) -> int | None:
        """Connector version that the peer announced, or None."""
        return self.peer.dialect

    @property
    def is_notify_only(self) -> bool:
        """Whether there is nothing to read."""
        return not any(self.local_block_ids)


@final
class HeartbeatOrder(NamedTuple):
    """Leases of one peer engine that are to be renewed now.

    Attributes:
        peer: Engine that holds the blocks.
        peer_request_ids: Requests there, oldest first, each once.
    """

    peer: PeerAddress
    peer_request_ids: tuple[str, ...]

    @property
    def peer_engine_id(self) -> str:
        """Engine that holds the blocks."""
        return self.peer.engine_id

    @property
    def peer_host(self) -> str:
        """Address of the peer's side channel."""
        return self.peer.host

    @property
    def peer_port(self) -> int:
        """Port of the peer's side channel."""
        return self.peer.port

    @property
    def peer_tp(self) -> int:
        """Tensor-parallel size of the peer."""
        return self.peer.tp

    @property
    def peer_pp(self) -> int:
        """Pipeline-parallel size of the peer."""
        return self.peer.pp

    @property
    def peer_dcp(self) -> int:
        """Decode-context-parallel size of the peer."""
        return self.peer.dcp

    @property
    def peer_generation(self) -> int | None:
        """Registration generation that the peer's tickets were written under, or None."""
        peer = self.peer
        return peer.registration_generation if peer.generation is None else peer.generation

    @property
    def peer_dialect(self) -> int | None:
        """Connector version that the peer announced, or None."""
        return self.peer.dialect


@final
class FenceOrder(NamedTuple):
    """A fence word that the workers write before the request's blocks can be read."""

    request_id: str
    slot: int
    generation: int


@final
class GrantOrder(NamedTuple):
    """A lease of `lease_s` seconds that starts now, on the workers' clocks."""

    request_id: str
    lease_s: float
    fence: tuple[int, int] | None


@final
class StepPlan(NamedTuple):
    """Everything that one scheduler step orders, in the order in which the scheduler decided it.

    Attributes:
        reads: Reads and notifications to start.
        fences: Fence words to write, before anything else of the same request.
        grants: Leases that start.
        releases: Producer requests that will not be handed over after all; the engine has freed them already.
        saves: (request id, blocks per group) to copy to host memory in this step.
        heartbeats: Leases at peers to renew.
        expects: Producer requests whose readers may be heard before the grant.
        revokes: Producer requests whose lease ends now; the engine waits for them to be reported as sent.
        cancels: Requests whose running read is no longer wanted; the engine still waits for its end.
    """

    reads: tuple[ReadOrder, ...] = ()
    fences: tuple[FenceOrder, ...] = ()
    grants: tuple[GrantOrder, ...] = ()
    releases: tuple[str, ...] = ()
    saves: tuple[tuple[str, Blocks], ...] = ()
    heartbeats: tuple[HeartbeatOrder, ...] = ()
    expects: tuple[str, ...] = ()
    revokes: tuple[str, ...] = ()
    cancels: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the step orders nothing at all."""
        return self == EMPTY_PLAN

    def to_bytes(self) -> bytes:
        """Return the plan as documented, versioned JSON (UTF-8)."""
        from kv_scheduler_state._plan_codec import encode_plan

        return encode_plan(self)

    @staticmethod
    def from_bytes(data: bytes) -> StepPlan:
        """Return the plan that `to_bytes` wrote.

        Raises:
            PlanDecodeError: `plan-not-json`, `plan-version` or `plan-malformed`.
        """
        from kv_scheduler_state._plan_codec import decode_plan

        return decode_plan(data)


EMPTY_PLAN: Final = StepPlan()
"""The plan of a step in which nothing happened."""
