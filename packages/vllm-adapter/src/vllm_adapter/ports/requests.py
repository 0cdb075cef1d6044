"""Protocols for kv-scheduler-state: the life of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.ports.values import BlockIds

__all__ = [
    "Admission",
    "BlockList",
    "FenceOrder",
    "FinishDecision",
    "GrantOrder",
    "HeartbeatOrder",
    "PeerAddress",
    "PromptIdentity",
    "ReadOrder",
    "SchedulerState",
    "StepPlan",
]


class BlockList(Protocol):
    """Blocks of one KV-cache group, in token order.

    A block covers `block_tokens * dcp` tokens. Example: 4 tokens per block, a prefix hit of 8 tokens, `ids=(5, 6)`,
    `first_token=8`: block 5 holds tokens 8 to 11 and block 6 holds tokens 12 to 15.
    """

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def first_token(self) -> int:
        """Index in the prompt of the first token that `ids[0]` stands for; 0 for a state, where it means nothing."""
        ...

    @property
    def null(self) -> int | None:
        """The id that stands for "no block here"; None if every id is a block."""
        ...


class PeerAddress(Protocol):
    """The peer engine that an order is about, as its ticket names it."""

    @property
    def engine_id(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def dcp(self) -> int: ...
    @property
    def generation(self) -> int | None:
        """Generation of the peer's memory registration that the ticket was written under, or None."""
        ...

    @property
    def dialect(self) -> int | None:
        """Connector version that the peer's ticket announced, or None."""
        ...


class ReadOrder(Protocol):
    """A request's read, or the notification that stands in for it."""

    @property
    def request_id(self) -> str: ...
    @property
    def peer(self) -> PeerAddress: ...
    @property
    def peer_request_id(self) -> str: ...
    @property
    def peer_blocks(self) -> Sequence[BlockList]: ...
    @property
    def local_blocks(self) -> Sequence[BlockList]:
        """Blocks to fill; all without ids for a notify-only order (full prefix hit, or aborted before allocation)."""
        ...

    @property
    def tokens(self) -> int:
        """Prompt tokens that the local KV holds after the read: the end (exclusive) of what is ordered."""
        ...

    @property
    def fence(self) -> tuple[int, int] | None:
        """(slot, generation) to verify after the read."""
        ...

    @property
    def nonce(self) -> str:
        """Nonce of the grant, to send back in every notification; empty for a peer that gave none."""
        ...

    @property
    def lease_s(self) -> float | None: ...
    @property
    def is_reported(self) -> bool:
        """Whether the scheduler waits for the end of this order."""
        ...

    @property
    def prompt(self) -> str:
        """Digest of the prompt in the ticket, already verified; empty if the ticket has none."""
        ...

    @property
    def is_notify_only(self) -> bool: ...


class HeartbeatOrder(Protocol):
    """Leases of one peer engine that are to be renewed now."""

    @property
    def peer(self) -> PeerAddress: ...
    @property
    def readers(self) -> Sequence[tuple[str, str]]:
        """(peer request id, nonce) pairs."""
        ...


class FenceOrder(Protocol):
    """A fence word to write before the request's blocks can be read."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...


class GrantOrder(Protocol):
    """A lease that starts now, on the worker's clock."""

    @property
    def request_id(self) -> str: ...
    @property
    def lease_s(self) -> float: ...
    @property
    def fence(self) -> tuple[int, int] | None: ...
    @property
    def nonce(self) -> str: ...


class StepPlan(Protocol):
    """All orders of one scheduler step."""

    @property
    def reads(self) -> Sequence[ReadOrder]: ...
    @property
    def expects(self) -> Sequence[str]:
        """Producer requests whose readers may report before the grant."""
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
        """Producer requests whose lease ends now; the scheduler waits for them to be reported as sent."""
        ...

    @property
    def restarts(self) -> Sequence[str]:
        """Producer requests whose prompt is computed from the beginning again; each has a new word in `fences`."""
        ...

    @property
    def saves(self) -> Sequence[tuple[str, BlockIds]]:
        """(request id, blocks per group) to copy to the host buffer in this step."""
        ...

    @property
    def completes(self) -> Sequence[str]:
        """Requests whose prompt is complete with this step's saves (host-buffer mode)."""
        ...

    @property
    def heartbeats(self) -> Sequence[HeartbeatOrder]: ...
    @property
    def cancels(self) -> Sequence[str]:
        """Requests whose running read is no longer wanted; the scheduler still waits for its end."""
        ...

    @property
    def passes(self) -> Sequence[str]:
        """The part of `cancels` whose hand-over another request will read: the peer must not be told that it is done."""
        ...

    @property
    def voids(self) -> Sequence[str]:
        """Requests whose read, ordered by now, must end badly: the cache was reset."""
        ...

    @property
    def failures(self) -> Sequence[str]:
        """Requests that the host parked for a read that nobody will make; report them as received and failed."""
        ...

    @property
    def is_empty(self) -> bool: ...


class PromptIdentity(Protocol):
    """Computes what a ticket binds a prompt to."""

    @property
    def refusal(self) -> str:
        """Code of the reason why this engine cannot identify the prompt; empty if it can."""
        ...

    def digest(self, tokens: int) -> str | None:
        """Return the digest of the first `tokens` tokens, None if the request has fewer or cannot be identified."""
        ...


class Admission(Protocol):
    """Decision on a request that has just arrived."""

    @property
    def role(self) -> Literal["none", "producer", "consumer"]: ...
    @property
    def rejected_code(self) -> str:
        """Code of the reason why the ticket is refused (the prompt is then computed here); empty otherwise."""
        ...

    @property
    def rejected_message(self) -> str: ...
    @property
    def truncate_tokens(self) -> int:
        """Trailing prompt tokens that a producer must drop before the prefix lookup."""
        ...


class FinishDecision(Protocol):
    """Decision on a finished request's blocks."""

    @property
    def keep_blocks(self) -> bool: ...
    @property
    def params(self) -> Mapping[str, object] | None:
        """`kv_transfer_params` of the response, in vLLM's wire names."""
        ...

    @property
    def withheld_code(self) -> str:
        """Code of the reason why a producer's finished prompt is not handed over; empty otherwise."""
        ...


class SchedulerState(Protocol):
    """The request machines of the scheduler process: events in, decisions out.

    A call that is refused raises an exception with `code`, `fault`, `is_retry_safe` and `context`, and changes nothing; only
    a refused allocation with external tokens puts the request into the `failures` of the next plan.
    """

    def arrive(
        self,
        request_id: str,
        params: object,
        *,
        prompt_tokens: int,
        identity: PromptIdentity | None = None,
        now_s: float,
    ) -> Admission: ...
    def external_tokens(self, request_id: str, *, computed_tokens: int) -> int | None:
        """Prompt tokens to load beyond the local prefix hit; None: ask again later, a sibling reads the same hand-over."""
        ...

    def allocate(
        self,
        request_id: str,
        *,
        block_ids: BlockIds,
        new_block_ids: BlockIds,
        external_tokens: int,
        preemptions: int = 0,
        now_s: float,
    ) -> None:
        """Note a request's blocks; `new_block_ids` are those not covered by a prefix hit."""
        ...

    def scheduled(self, request_id: str, *, new_block_ids: BlockIds, is_prompt_complete: bool) -> None:
        """Note a (chunk of a) prefill that runs in this step (host-buffer saves)."""
        ...

    def preempt(self, request_id: str, *, now_s: float) -> None: ...
    def finish(
        self,
        request_id: str,
        *,
        reason: Literal["length", "stop", "abort", "error"],
        block_ids: BlockIds,
        computed_tokens: int,
        withhold: bool = False,
        identity: PromptIdentity | None = None,
        now_s: float,
    ) -> FinishDecision:
        """End a request; `withhold` keeps the ticket back although the request ended well."""
        ...

    def report(self, *, sent: Sequence[str], received: Sequence[str], failed: Sequence[str]) -> None:
        """Note the workers' reports; ids of `failures` that come back are accepted."""
        ...

    def take_step_plan(self, *, now_s: float) -> StepPlan: ...
    def relieve(self, *, now_s: float) -> bool:
        """Order the oldest lease back under memory pressure; True while blocks are about to be freed."""
        ...

    def reset(self, *, now_s: float) -> None:
        """Void all KV from before now; reads under way are in the next plan's `voids`."""
        ...

    def set_generation(self, generation: int | None) -> None:
        """Name this registration generation in tickets from now on."""
        ...

    @property
    def heartbeat_delay_s(self) -> float:
        """Delay of the heartbeats in the latest plan that has any: that of the most overdue peer engine."""
        ...

    def drain(self) -> None:
        """Give no tickets from now on; open leases and reads go on. One-way."""
        ...

    @property
    def is_draining(self) -> bool: ...
    @property
    def lease_count(self) -> int:
        """Requests whose blocks are kept for a reader."""
        ...

    @property
    def leased_blocks(self) -> Sequence[int]:
        """Blocks that these keep, per group; a block that two of them share counts twice."""
        ...

    @property
    def fence_slots_used(self) -> int:
        """Fence slots in use; with all of them in use nothing is handed over."""
        ...

    def snapshot(self, *, now_s: float) -> Sequence[Mapping[str, object]]: ...
    def state_counts(self) -> Mapping[str, int]:
        """Live requests by state; costs a scan."""
        ...
