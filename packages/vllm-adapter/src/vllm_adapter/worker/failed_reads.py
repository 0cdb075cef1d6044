"""Failed reads of a rank: counted here, and reported to the scheduler, which logs each once for all ranks."""

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
    """Counts failed reads. Engine thread only.

    Args:
        recorder: Records the counts.
        log: Rate-limits lines about producers that could not be notified.
    """

    def __init__(self, recorder: Recorder, log: CauseLog) -> None:
        self._recorder = recorder
        self._log = log

    def count(self, ends: Iterable[ReadEnd]) -> dict[str, ReadFailure]:
        """Count failed reads and return their reasons by request; the scheduler logs each request once for all ranks.

        A failure to notify a producer that its blocks are not needed is logged here, unless lines of the code are rate-limited.
        """
        reasons: dict[str, ReadFailure] = {}
        for end in ends:
            order, peer = end.order, end.order.peer
            producer = f"request {order.peer_request_id} of engine {peer.engine_id} at {peer.host}:{peer.port}"
            reason = f"{end.message} ({end.code})"
            if order.is_reported:
                self._recorder.observe("read_failure_codes", end.code)
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
