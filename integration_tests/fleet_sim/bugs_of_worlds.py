"""Planted bugs in what resets, sleep, mirrors, releases, prefix hits and states rest on.

Each is a function that takes the original and returns what stands in its place.
"""

from __future__ import annotations

from typing import Any

import kv_handshake._judging
import kv_scheduler_state._scheduler_base
from kv_handshake._policy import Verdict
from kv_scheduler_state._blocks import BlockRules
from kv_scheduler_state._consumer import Consumers
from kv_scheduler_state._producer import Producers
from vllm_adapter.scheduler.chunks import PrefillChunks, ScheduledTokens
from vllm_adapter.worker.engine_thread import WorkerSide
from vllm_adapter.worker.pages import HostMirror
from vllm_adapter.worker.transfer.leases import LeaseKeeper

__all__ = ["NOTHING", "SWAPPED"]


def _leases_stay(old: Any) -> Any:  # noqa: ARG001
    def void(self: Producers, request_id: str, record: Any, now_s: float) -> None:  # noqa: ARG001
        record.is_void = record.state in {"prefilling", "prefilled"}

    return void


def _prompts_stay(old: Any) -> Any:
    def void(self: Producers, request_id: str, record: Any, now_s: float) -> None:
        old(self, request_id, record, now_s)
        record.is_void = False

    return void


def _whole_read(old: Any) -> Any:
    """A prefix hit is read once more, into blocks that others use."""
    return lambda self, block_ids, _new, _start, tokens: old(self, block_ids, block_ids, 0, tokens)


def _half_blocks_skipped(old: Any) -> Any:
    """The block that a chunk left half full is not copied again with the next chunk."""

    def scheduled(self: PrefillChunks, step: ScheduledTokens) -> Any:
        if step.is_fresh or step.new_tokens <= 4:
            return old(self, step)
        later = ScheduledTokens(step.request_id, step.block_ids, False, step.computed_tokens + 4, step.new_tokens - 4)
        return old(self, later)

    return scheduled


def _accepts_all(old: Any) -> Any:  # noqa: ARG001
    return lambda *_: Verdict(protocol=1, capabilities=frozenset())


def _state_of_whole_prompt(old: Any) -> Any:
    """A state is read back for a prompt that ends where it does, whose last token it then sees twice."""

    def loadable(self: Consumers, ticket: Any, prompt_tokens: int, *, is_readback: bool) -> int:
        is_whole = is_readback and ticket.peer_tokens == prompt_tokens
        return prompt_tokens if is_whole else old(self, ticket, prompt_tokens, is_readback=is_readback)

    return loadable


SWAPPED = {
    "reset-leases-stay": (Producers, "void", _leases_stay),
    "reset-prompts-stay": (Producers, "void", _prompts_stay),
    "hit-read-again": (BlockRules, "wanted", _whole_read),
    "mirror-half-blocks-skipped": (PrefillChunks, "scheduled", _half_blocks_skipped),
    "releases-not-compared": (kv_handshake._judging, "judge", _accepts_all),
    "state-seen-twice": (Consumers, "_loadable_tokens", _state_of_whole_prompt),
}
"""(Owner, name, what makes the replacement) by bug."""

NOTHING = {
    "reset-does-nothing": (kv_scheduler_state._scheduler_base, "void_all"),
    "sleep-leases-stay": (LeaseKeeper, "end_all"),
    "mirror-not-saved": (HostMirror, "save"),
    "mirror-not-restored": (HostMirror, "restore"),
    "mirror-failure-hidden": (WorkerSide, "_void_failed_copy"),
}
"""(Owner, name) of functions that do nothing, by bug."""
