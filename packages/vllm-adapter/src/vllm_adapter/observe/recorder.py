"""Recorder of a process: observations for the metrics, and log lines for the operator.

Observations are lists of numbers by key, as vLLM carries them between processes; a counter is a list of ones. Every module that
counts, observes or logs receives this recorder and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.observe.cause_log import CauseLog, short_text
from vllm_adapter.observe.hand_overs import HandOverLog
from vllm_adapter.observe.metric_tables import PATH_KEY, empty_observations

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from vllm_adapter.ports import TransferResult

__all__ = ["Recorder"]

_MOST_TRACEBACKS = 100


@final
class Recorder:
    """Collects observations on any thread, which the engine thread takes once per step; writes log lines.

    Args:
        ucx_tls: UCX's configured choice of transports; a label of the bytes that the UCX backend moved.
        is_lead: Whether this is the rank that warns on behalf of all ranks of its engine. The others log the same lines at level
            info, so that an event seen by all ranks is one warning and not eight.
        now_s: The monotonic clock of the limits of log lines; None for the process's.

    Attributes:
        hand_overs: Timestamps of the latest hand-overs in this process.
        cause_log: Log lines of this process, limited per cause.
    """

    def __init__(self, *, ucx_tls: str = "", is_lead: bool = True, now_s: Callable[[], float] | None = None) -> None:
        self.hand_overs = HandOverLog()
        self._ucx_tls = ucx_tls
        self.cause_log = CauseLog(now_s or time.monotonic, is_lead=is_lead)
        # A child of the host's logger, so that its format and level apply.
        self._logger = logging.getLogger("vllm.vllm_adapter")
        self._lock = threading.Lock()
        self._data = empty_observations()
        self._levels: dict[str, float] = {}
        self._seen_errors: set[tuple[str, str]] = set()

    # ---------------------------------------------------------------------------------------------- observations

    def read_done(self, result: TransferResult) -> None:
        """Record a read from one producer rank that is done: a transfer, or all parts of a streamed prompt."""
        with self._lock:
            data = self._data
            data["transfer_duration"].append(result.wire_s)
            data["post_duration"].append(result.post_s)
            data["bytes_transferred"].append(result.bytes_moved)
            data["num_descriptors"].append(result.descriptor_count)
            data["queue_duration"].append(result.queue_s)
            if result.fence_s > 0:
                data["fence_duration"].append(result.fence_s)
            data[PATH_KEY] += [
                [backend or "unknown", f"{peer_kind}->{local_kind}", self._ucx_tls if backend == "UCX" else "", size]
                for backend, local_kind, peer_kind, size in result.bytes_by_path
            ]

    def count(self, key: str, times: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self._data[key].extend([1] * times)

    def observe(self, key: str, value: object) -> None:
        """Record one value of a series, or a code."""
        with self._lock:
            self._data[key].append(value)

    def level(self, key: str, value: float) -> None:
        """Record the current value of a level, if it has changed.

        Example: the levels 0, 4096, 4096, 1024 of `quarantined_bytes` become the changes +4096 and -3072.
        """
        with self._lock:
            change = value - self._levels.get(key, 0)
            if change:
                self._levels[key] = value
                self._data[key].append(change)

    def take(self) -> dict[str, list[Any]] | None:
        """Return the observations since the last call; None if there are none."""
        with self._lock:
            if not any(self._data.values()):
                return None
            taken, self._data = self._data, empty_observations()
            return taken

    # ---------------------------------------------------------------------------------------------- log lines

    def info(self, cause: str, message: str) -> None:
        """Log an event of normal life; lines of one cause are limited, see `CauseLog`."""
        self.cause_log.info(cause, "%s", message)

    def warn(self, cause: str, message: str) -> None:
        """Log an event that an operator should check, under the same limit; once per engine, see `is_lead`."""
        self.cause_log.warning(cause, "%s", message)

    def error(self, cause: str, message: str, trace: str | None = None) -> None:
        """Log a failure under the same limit, with its traceback if given."""
        self.cause_log.error(cause, "%s", message, trace=trace)

    @contextmanager
    def guarded(self, action: str) -> Generator[None]:
        """Turn an exception inside the block into a count and, the first time, a log line with its traceback."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (one order can only fail itself)
            self.trouble(action, error)

    def trouble(self, action: str, error: Exception, detail: str = "") -> None:
        """Count an unexpected exception; log it with its traceback unless a similar one was logged before.

        Once 100 kinds have been logged, lines of further kinds have no traceback and are rate-limited, see `CauseLog`.

        Args:
            action: Name of the work, from a few constant texts, because every text is remembered.
            error: The exception.
            detail: The request or peer concerned; it is logged but not remembered.
        """
        self.count("num_callback_errors")
        kind = (action, type(error).__name__)
        line = short_text(f"{detail}: {action}" if detail else action)
        with self._lock:
            if kind in self._seen_errors:
                return
            has_room = len(self._seen_errors) < _MOST_TRACEBACKS
            if has_room:
                self._seen_errors.add(kind)
        if has_room:
            self._logger.error("%s failed unexpectedly; the other orders go on", line, exc_info=error)
        else:
            self.cause_log.error(
                "worker-exception",
                "%s failed unexpectedly (%s: %s); the other orders go on",
                line,
                type(error).__name__,
                error,
            )
