"""What the adapter needs from kv-scheduler-state: the life of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.ports.values import BlockIds

__all__ = [
    "ReadOrder",
    "HeartbeatOrder",
    "FenceOrder",
    "GrantOrder",
    "StepPlan",
    "Admission",
    "FinishDecision",
    "SchedulerState",
    "LeaseEnd",
    "LeaseTable",
    "PeerOrder",
]


class PeerOrder(Protocol):
    """The peer engine that an order is about, as its ticket names it."""

    @property
    def peer_engine_id(self) -> str: ...
    @property
    def peer_host(self) -> str: ...
    @property
    def peer_port(self) -> int: ...
    @property
    def peer_tp(self) -> int: ...
    @property
    def peer_pp(self) -> int: ...
    @property
    def peer_dcp(self) -> int: ...
    @property
    def peer_generation(self) -> int | None: ...
    @property
    def peer_dialect(self) -> int | None:
        """Connector version that the peer's ticket announced."""
        ...


class ReadOrder(PeerOrder, Protocol):
    """One request's read, from the scheduler to the workers."""

    @property
    def request_id(self) -> str: ...
    @property
    def peer_request_id(self) -> str: ...
    @property
    def peer_block_ids(self) -> BlockIds: ...
    @property
    def local_block_ids(self) -> BlockIds:
        """All empty for a notify-only order (full prefix hit, or aborted before its blocks were allocated)."""
        ...

    @property
    def fence(self) -> tuple[int, int] | None: ...
    @property
    def lease_s(self) -> float | None: ...
    @property
    def is_reported(self) -> bool:
        """Whether the scheduler waits for the end of this order."""
        ...

    @property
    def external_tokens(self) -> int:
        """Prompt tokens that the read covers."""
        ...

    @property
    def local_computed_blocks(self) -> Sequence[int]:
        """Blocks per group in front of `local_block_ids` that a prefix hit covers."""
        ...


class HeartbeatOrder(PeerOrder, Protocol):
    """Leases of one peer engine that are to be renewed now."""

    @property
    def peer_request_ids(self) -> Sequence[str]: ...


class FenceOrder(Protocol):
    """A fence word that the workers write before the request's blocks can be read."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...


class GrantOrder(Protocol):
    """A lease that starts now, on the workers' clocks."""

    @property
    def request_id(self) -> str: ...
    @property
    def lease_s(self) -> float: ...
    @property
    def fence(self) -> tuple[int, int] | None: ...


class StepPlan(Protocol):
    """What one scheduler step tells the workers."""

    @property
    def reads(self) -> Sequence[ReadOrder]: ...
    @property
    def expects(self) -> Sequence[str]:
        """Producer requests whose readers may be heard before the grant."""
        ...

    @property
    def fences(self) -> Sequence[FenceOrder]: ...
    @property
    def grants(self) -> Sequence[GrantOrder]: ...
    @property
    def releases(self) -> Sequence[str]:
        """Producer requests that will not be handed over after all."""
        ...

    @property
    def revokes(self) -> Sequence[str]:
        """Producer requests whose lease ends now; the scheduler waits for them to be reported."""
        ...

    @property
    def cancels(self) -> Sequence[str]:
        """Requests whose running read is no longer wanted; the scheduler still waits for its end."""
        ...

    @property
    def is_empty(self) -> bool: ...
    @property
    def saves(self) -> Sequence[tuple[str, BlockIds]]: ...
    @property
    def heartbeats(self) -> Sequence[HeartbeatOrder]: ...
    def to_bytes(self) -> bytes: ...


class Admission(Protocol):
    """What the scheduler does with a request that has just arrived."""

    @property
    def role(self) -> Literal["none", "producer", "consumer"]: ...
    @property
    def rejected_code(self) -> str:
        """Why the ticket was refused (the request is then prefilled locally); empty otherwise."""
        ...

    @property
    def rejected_message(self) -> str: ...
    @property
    def truncate_tokens(self) -> int:
        """Trailing prompt tokens that a state-model producer must drop before the prefix lookup."""
        ...


class FinishDecision(Protocol):
    """Answer to the end of a request."""

    @property
    def keep_blocks(self) -> bool: ...
    @property
    def params(self) -> Mapping[str, object] | None:
        """`kv_transfer_params` of the response, in vLLM's wire names."""
        ...


class SchedulerState(Protocol):
    """Both machines of the scheduler process behind one facade: events in, decisions out."""

    def arrive(self, request_id: str, params: object, *, prompt_tokens: int, now_s: float) -> Admission: ...
    def external_tokens(self, request_id: str, *, computed_tokens: int) -> int:
        """Prompt tokens to load from the peer beyond the local prefix hit; free of side effects."""
        ...

    def allocate(
        self, request_id: str, *, block_ids: BlockIds, new_block_ids: BlockIds, external_tokens: int, now_s: float
    ) -> None:
        """Blocks were given to the request; `new_block_ids` are those not covered by a prefix hit."""
        ...

    def scheduled(self, request_id: str, *, new_block_ids: BlockIds, is_prompt_complete: bool) -> None:
        """A (chunk of a) prefill runs in this step (host-buffer saves)."""
        ...

    def preempt(self, request_id: str, *, now_s: float) -> None: ...
    def finish(
        self,
        request_id: str,
        *,
        reason: Literal["length", "stop", "abort", "error"],
        block_ids: BlockIds,
        computed_tokens: int,
        now_s: float,
    ) -> FinishDecision: ...
    def transfer_results(self, *, sent: Sequence[str], received: Sequence[str], failed: Sequence[str]) -> None: ...
    def take_step_plan(self, *, now_s: float) -> StepPlan: ...
    @property
    def heartbeat_delay_s(self) -> float:
        """How long the heartbeats of the latest plan with any had been due: those to the most overdue peer engine."""
        ...

    def has_work(self) -> bool: ...
    def reset(self, *, now_s: float) -> Sequence[str]:
        """Void all KV from before now; returns the requests whose read is under way, for the caller to end."""
        ...

    def set_generation(self, generation: int | None) -> None:
        """Name this registration generation in tickets from now on."""
        ...

    def snapshot(self, *, now_s: float) -> Sequence[Mapping[str, object]]: ...
    def state_counts(self) -> Mapping[str, int]:
        """Live requests by state; costs a scan."""
        ...


class LeaseEnd(Protocol):
    """A producer request whose blocks may be given back, after its fence was bumped."""

    @property
    def request_id(self) -> str: ...
    @property
    def reason(self) -> Literal["read", "expired", "released"]: ...
    @property
    def fence(self) -> tuple[int, int] | None:
        """(slot, generation to write before the blocks are reported free)."""
        ...

    @property
    def is_reported(self) -> bool:
        """Whether the scheduler waits to hear of it as sent."""
        ...


class LeaseTable(Protocol):
    """Producer leases on one worker: the pure part, time comes in."""

    def expect(self, request_id: str, *, now_s: float) -> None:
        """Announce a request whose readers may be heard before its grant."""
        ...

    def grant(self, request_id: str, *, lease_s: float, fence: tuple[int, int] | None, now_s: float) -> None: ...
    def renew(self, request_id: str, *, now_s: float) -> bool: ...
    def read_complete(self, request_id: str, *, reader: str, reader_count: int, now_s: float) -> str:
        """Count one reader once; "counted", "complete", "duplicate", "unknown", "expired" or "bad-count"."""
        ...

    def release(self, request_id: str, *, now_s: float) -> None: ...
    def take_ended(self, *, now_s: float) -> Sequence[LeaseEnd]:
        """Leases that ended since the last call, oldest first; expires those that are due."""
        ...

    @property
    def next_deadline_s(self) -> float | None: ...
    def live_count(self) -> int: ...
    def snapshot(self, *, now_s: float) -> Sequence[Mapping[str, object]]:
        """Every lease that is expected or granted, oldest first; `request_id` is among its values."""
        ...
