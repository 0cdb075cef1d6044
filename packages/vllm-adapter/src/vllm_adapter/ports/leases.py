"""Protocols for kv-scheduler-state: the leases on one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_scheduler_state import LeaseEnd, Refusal, StepPlan

__all__ = [
    "AnnouncedFences",
    "LeaseTable",
]


class LeaseTable(Protocol):
    """The producer's leases on one worker; pure, so time is passed in. Transfer thread only."""

    def apply(self, plan: StepPlan, *, void: Sequence[str] = (), now_s: float) -> tuple[Refusal, ...]:
        """Apply the producer's part of a plan; `void` names grants whose KV is lost, and their leases end at once."""
        ...

    def expect(self, request_id: str, *, now_s: float) -> None:
        """Announce a request whose readers may report before its grant."""
        ...

    def request_of(self, named_id: str) -> str:
        """Return the engine's id of a request that a peer's notification names."""
        ...

    def release(self, request_id: str, *, now_s: float) -> None: ...
    def renew(self, request_id: str, *, nonce: str = "", now_s: float) -> bool: ...
    def read_complete(
        self, request_id: str, *, reader: str, consumer: str = "", reader_count: int, nonce: str = "", now_s: float
    ) -> str:
        """Count a reader of a consumer engine, each reader once; return the verdict.

        "counted", "complete", "duplicate", "unknown", "expired", "stale" (another grant's nonce), "bad-count", "bad-reader"
        or "too-many-consumers".
        """
        ...

    def take_ended(self, *, now_s: float) -> Sequence[LeaseEnd]:
        """Expire the leases that are due; return the leases that ended since the last call, oldest first."""
        ...

    def live_count(self) -> int: ...
    def live_ids(self) -> Sequence[str]:
        """Return the requests that are expected or granted, oldest first."""
        ...

    def granted_count(self) -> int: ...
    def snapshot(self, *, now_s: float, most: int | None = None) -> Sequence[Mapping[str, object]]:
        """Return leases that are expected or granted, oldest first, at most `most`; `request_id` is among the values."""
        ...


class AnnouncedFences(Protocol):
    """Fence words of requests that were announced and have not been granted or released yet. Engine thread only."""

    def apply(self, plan: StepPlan) -> tuple[Sequence[tuple[int, int]], Sequence[str]]:
        """Process a plan; return the (slot, generation) words to write now and the grants whose KV is lost."""
        ...

    def slot(self, request_id: str) -> int | None:
        """Return the request's fence slot, None if it has none."""
        ...

    @property
    def ids(self) -> Sequence[str]:
        """All announced requests."""
        ...

    def lose(self) -> None:
        """Record that the memory and fence words of all announced requests are lost (sleep)."""
        ...
