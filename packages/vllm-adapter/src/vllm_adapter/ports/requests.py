"""Protocols for kv-scheduler-state: the machine of requests, and the leases on one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from vllm_adapter.ports.streams import StreamState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_scheduler_state import Admission, FinishDecision, StepPlan
    from vllm_adapter.ports.values import BlockIds

__all__ = [
    "PromptIdentity",
    "SchedulerState",
]


class PromptIdentity(Protocol):
    """Computes what a ticket binds a prompt to."""

    @property
    def refusal(self) -> str:
        """Code of the reason why this engine cannot identify the prompt; empty if it can."""
        ...

    def digest(self, tokens: int) -> str | None:
        """Return the digest of the first `tokens` tokens, None if the request has fewer or cannot be identified."""
        ...

    def media(self, tokens: int) -> tuple[int, str] | None:
        """Return how many media items begin among the first `tokens` tokens, and the digest without them; None for none."""
        ...


class SchedulerState(StreamState, Protocol):
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

    def must_fail(self, request_id: str) -> bool:
        """Whether the engine must end a request with an error: it lacks a part of the prompt, and reads none of it."""
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

    def scheduled(
        self,
        request_id: str,
        *,
        new_block_ids: BlockIds,
        is_prompt_complete: bool,
        computed_tokens: int = 0,
        touched_block_ids: BlockIds | None = None,
        held_tokens: int = 0,
    ) -> None:
        """Note a (chunk of a) prefill that runs in this step: blocks that it adds and writes, tokens after and before it."""
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

    def stream_whole(self, request_id: str) -> None:
        """Hand a request over whole that a peer wants to read early; before its first allocation."""
        ...

    def stream_ended(self, request_id: str, rank: object, *, is_done: bool) -> None:
        """Take a rank's word that its part of a stream is quiet, and whether its fence held."""
        ...

    def bind_free_blocks(self, free_blocks: Callable[[], int] | None) -> None:
        """Ask this for the free blocks of the host's pool before a stream takes some."""
        ...

    def report(self, *, sent: Sequence[str], received: Sequence[str], failed: Sequence[str]) -> None:
        """Note the workers' reports; ids of `failures` that come back are accepted."""
        ...

    def take_step_plan(self, *, now_s: float) -> StepPlan: ...
    def give_way(self, *, now_s: float) -> str:
        """Take back the oldest blocks kept for a next turn, else give up the newest waiting read and return its request."""
        ...

    def revoke_all(self, *, now_s: float) -> None:
        """Order the end of every lease."""
        ...

    def reset(self, *, now_s: float) -> None:
        """Void all KV from before now; reads under way are in the next plan's `voids`."""
        ...

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """Seal and verify tickets with these fleet secrets from now on; the first one seals.

        Raises a coded error for a short secret, or for none.
        """
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

    @property
    def stream_slots_used(self) -> int:
        """Slots of prompts that peers may read while they are computed."""
        ...

    @property
    def streams_lack_blocks(self) -> bool:
        """Whether a streamed read of this engine waited for blocks in the latest step."""
        ...

    @property
    def stream_blocks_held(self) -> int:
        """Blocks that streamed reads of this engine hold before their data is whole."""
        ...

    def snapshot(self, *, now_s: float, most: int | None = None) -> Sequence[Mapping[str, object]]:
        """Describe live requests, oldest first, at most `most` of them; changes nothing, any thread."""
        ...

    def state_counts(self) -> Mapping[str, int]:
        """Live requests by state; costs a scan; any thread."""
        ...
