"""Failed reads of a rank: reported to the scheduler, which counts and logs each once for all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vllm_adapter.steps import ReadFailure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_adapter.observe.cause_log import CauseLog
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.steps import ReadEnd

__all__ = ["FailedReads"]


@final
class FailedReads:
    """Collects the reasons of failed reads, and counts failed notifications. Engine thread only.

    Args:
        recorder: Records the counts.
        log: Rate-limits lines about producers that could not be notified.
    """

    def __init__(self, recorder: Recorder, log: CauseLog) -> None:
        self._recorder = recorder
        self._log = log

    def take(self, ends: Iterable[ReadEnd]) -> dict[str, ReadFailure]:
        """Return the reasons of failed reads by request.

        A failure to notify a producer that its blocks are not needed is logged here, unless lines of the code are rate-limited.
        """
        reasons: dict[str, ReadFailure] = {}
        for end in ends:
            order, peer = end.order, end.order.ticket.peer
            producer = f"request {order.ticket.peer_request_id} of engine {peer.engine_id} at {peer.host}:{peer.port}"
            reason = f"{end.message} ({end.code})"
            if order.is_reported:
                reasons[order.request_id] = ReadFailure(end.code, f"{producer}: {reason}")
            else:
                self._recorder.count("num_failed_notifications", times=int(end.was_met))
                self._log.warning(
                    end.code,
                    "request %s: could not notify %s that it is no longer needed; its blocks stay leased until the lease "
                    "expires: %s",
                    order.request_id,
                    producer,
                    reason,
                )
        return reasons
