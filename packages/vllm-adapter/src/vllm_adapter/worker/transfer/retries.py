"""Conditions for a second attempt at a read whose peer was lost.

Both attempts share one deadline. A rank whose part has arrived is neither read nor notified again, so a second attempt is made
only where a restart of the peer would be noticed, and only while the peer keeps its pages as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_adapter.worker.transfer.tickets import notices_restart

if TYPE_CHECKING:
    from vllm_adapter.worker.transfer.limits import ReadLimits
    from vllm_adapter.worker.transfer.records import PeerEngine, Read

__all__ = ["may_retry", "refused_retry"]


def may_retry(read: Read, now_s: float, limits: ReadLimits) -> bool:
    """Return whether to retry a read that has ended: its peer caused the failure, and time and attempts remain."""
    if not read.code or not read.may_retry or read.attempt > limits.retries or read.engine is None:
        return False
    is_in_time = now_s < min(read.deadline_s, read.trusted_until_s)
    return is_in_time and notices_restart(read.order, read.engine)


def refused_retry(read: Read, engine: PeerEngine, now_s: float, limits: ReadLimits) -> tuple[str, str] | None:
    """Return why a second attempt cannot continue where the first one ended, as (code, message); None if it can."""
    plan = engine.plan
    if not read.attempt or plan is None:
        return None
    if now_s >= read.deadline_s:
        return "transfer-timed-out", f"the engine was met anew only after {limits.read_timeout_s:g} s"
    is_same_plan = read.done_ranks <= set(plan.producer_ranks) and bool(read.conversion) == plan.is_staged
    if not is_same_plan or not notices_restart(read.order, engine):
        return "peer-changed", "the engine that was met anew keeps its pages in another way than before"
    return None
