"""All orders of a step, which the request machines send to the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.ports.orders import FenceOrder, GrantOrder, HeartbeatOrder, ReadOrder
    from vllm_adapter.ports.stream_orders import StreamPlan
    from vllm_adapter.ports.values import BlockIds

__all__ = ["StepPlan"]


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
        """The subset of `cancels` whose hand-over another request will read: the peer must not be notified that it is done."""
        ...

    @property
    def voids(self) -> Sequence[str]:
        """Requests whose read, if ordered before now, must end as failed: the cache was reset."""
        ...

    @property
    def failures(self) -> Sequence[str]:
        """Requests that the host holds for a read that will not happen; report them as received and failed."""
        ...

    @property
    def streams(self) -> StreamPlan:
        """Orders of streamed hand-overs."""
        ...

    @property
    def is_empty(self) -> bool: ...
    @property
    def is_local(self) -> bool:
        """Whether the transfer thread has nothing to do: at most words of streams and copies to the host buffer are ordered."""
        ...
