"""Recorder of a process: observations for the metrics, and log lines for the operator.

Texts of log lines and terminals that clients and peers can cause are bounded, and free of control characters.

Observations are lists of numbers by key, as vLLM carries them between processes; a counter is a list of ones. Every module that
counts, observes or logs receives this recorder and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.observe.hand_overs import HandOverLog
from vllm_adapter.observe.metric_tables import PATH_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from vllm_adapter.ports import TransferResult

__all__ = ["Guard", "Recorder", "plain_text", "tag_lines"]


# A child of the host's logger, so that its format and level apply.
_logger = logging.getLogger("vllm.vllm_adapter")
_host_logger = logging.getLogger("vllm")
_TAG = "kv-transfer: "
_LIBRARIES = ("kv_handshake", "kv_nixl_agent")
"""Loggers of the libraries, for which the host has no handlers."""
_MOST_CHARS = 2000
_LINES = 10
_PERIOD_S = 10.0
_MOST_CAUSES = 256
"""Most causes that are distinguished; codes are few, and all further ones count as one cause."""
_MOST_SUBJECTS = 256
_OWN_FILES = frozenset((__file__, contextlib.__file__))
"""Files that a line's caller is not in."""


def plain_text(text: str) -> str:
    """Return a text with its control characters escaped, because they could start another line or command a terminal."""
    return text if text.isprintable() else "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])


def short_text(text: str) -> str:
    """Return a plain text of at most 2000 characters, with a note of its length if it was longer."""
    plain = plain_text(text[:_MOST_CHARS])[:_MOST_CHARS]
    return plain if len(text) <= _MOST_CHARS else f"{plain}... ({len(text)} characters)"


@final
class _Tag(logging.Filter):
    """Puts the connector's tag in front of each of its lines, and keeps each on one line, whatever text a client sent."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  (arguments that do not fit: logging itself reports that)
            return True
        record.msg, record.args = short_text(text if text.startswith(_TAG) else _TAG + text), None
        return True


def tag_lines() -> None:
    """Prefix every log line of this package and its libraries with `kv-transfer: `; idempotent.

    Warnings of the libraries take the format and the handlers of the host's log; their lines of level INFO stay out of it.
    """
    if any(isinstance(known, _Tag) for known in _logger.filters):
        return
    for name in (_logger.name, *_LIBRARIES):
        logging.getLogger(name).addFilter(_Tag())
    for name in _LIBRARIES:
        its_logger = logging.getLogger(name)
        its_logger.parent = _host_logger
        its_logger.setLevel(its_logger.level or logging.WARNING)


@dataclass(slots=True)
class _Period:
    began_s: float
    lines: int = 0
    held_back: int = 0


@final
class Recorder:
    """Collects observations, which the engine thread takes once per step, and logs what clients and peers can cause; any thread.

    Of each cause it logs at most ten lines in ten seconds; the next line of the cause says how many were held back. Example: 300
    forged tickets in 2 s, all refused as ``ticket-seal``, make 10 lines. The 301st, 11 s after the first, is logged with "290
    more like this not logged".

    A line may hold texts of clients and peers. It is cut to 2000 characters, and unprintable characters are escaped: a newline
    would start a line that this engine never wrote, and an escape sequence could command a terminal.

    Args:
        ucx_tls: UCX's configured choice of transports; a label of the bytes that the UCX backend moved.
        is_lead: Whether this is the rank that warns on behalf of all ranks of its engine. The others log the same lines at level
            info, so that an event seen by all ranks is one warning and not eight.
        now_s: The monotonic clock of the limits of log lines; None for the process's.

    Attributes:
        hand_overs: Timestamps of the latest hand-overs in this process.
    """

    def __init__(self, *, ucx_tls: str = "", is_lead: bool = True, now_s: Callable[[], float] | None = None) -> None:
        self._now_s = now_s or time.monotonic
        self._warning_level = logging.WARNING if is_lead else logging.INFO
        self._periods: dict[str, _Period] = {}
        self._subjects: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
        self._lock = threading.Lock()
        self.hand_overs = HandOverLog()
        self._ucx_tls = ucx_tls
        self._data: defaultdict[str, list[Any]] = defaultdict(list)
        self._levels: dict[str, float] = {}

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
            if not self._data:
                return None
            taken, self._data = self._data, defaultdict(list)
            return dict(taken)

    # ---------------------------------------------------------------------------------------------- log lines

    def info(self, cause: str, text: str, *values: object) -> None:
        """Log an event of normal life under the same limit."""
        self._log(logging.INFO, cause, text, *values)

    def warning(self, cause: str, text: str, *values: object) -> None:
        """Log a warning unless its cause has used up its lines. A cause is a code, never a request, a peer or a peer's text."""
        self._log(self._warning_level, cause, text, *values)

    def error(self, cause: str, text: str, *values: object, trace: BaseException | str | None = None) -> None:
        """Log a failure under the same limit, with its traceback if given; lines of a cause count together at any level.

        The lines of a traceback given as text are indented, so that none of them looks like a line of the log.
        """
        self._log(logging.ERROR, cause, text, *values, trace=trace)

    def is_first(self, cause: str, *subject: str) -> bool:
        """Return whether this cause occurs for the first time with this subject, of which 256 count."""
        known = self._subjects[cause]
        is_first = subject not in known and len(known) < _MOST_SUBJECTS
        if is_first:
            known.add(subject)
        return is_first

    def _log(
        self, level: int, cause: str, text: str, *values: object, trace: BaseException | str | None = None
    ) -> None:
        with self._lock:
            held_back = self._admit(cause)
        if held_back is None:
            return
        line = short_text(text % values if values else text)
        more = f"; {held_back} more like this not logged" if held_back else ""
        if isinstance(trace, BaseException):
            trace = "".join(traceback.format_exception(trace))
        # Formatters append `exc_text` below the line: as long as it is, with each of its lines made plain.
        lines = "\n".join(f"    {plain_text(each)}" for each in trace.splitlines()) if trace else None
        if _logger.isEnabledFor(level):
            caller = logging.currentframe()
            while caller.f_code.co_filename in _OWN_FILES and caller.f_back is not None:
                caller = caller.f_back
            place = caller.f_code.co_filename, caller.f_lineno, "%s%s", (line, more), None, caller.f_code.co_name
            record = _logger.makeRecord(_logger.name, level, *place)
            record.exc_text = lines
            _logger.handle(record)

    def _admit(self, cause: str) -> int | None:
        """Return how many lines were held back before this one; None if this line is held back, too."""
        now_s = self._now_s()
        if cause not in self._periods and len(self._periods) >= _MOST_CAUSES:
            cause = ""
        period, held_back = self._periods.get(cause), 0
        if period is None or now_s - period.began_s >= _PERIOD_S:
            held_back = period.held_back if period is not None else 0
            period = self._periods[cause] = _Period(now_s)
        if period.lines >= _LINES:
            period.held_back += 1
            return None
        period.lines += 1
        return held_back

    @contextlib.contextmanager
    def guarded(self, action: str) -> Generator[None]:
        """Turn an exception inside the block into a count and a log line with its traceback, see `trouble`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (one order can only fail itself)
            self.trouble(action, error)

    def trouble(self, action: str, error: Exception, detail: str = "") -> None:
        """Count and log an unexpected exception; each action and kind of exception is a cause, with a traceback the first time.

        Args:
            action: Name of the work, from a few constant texts, because every text is remembered.
            error: The exception.
            detail: The request or peer concerned; it is logged but not remembered.
        """
        self.count("num_callback_errors")
        line = f"{detail}: {action}" if detail else action
        cause = f"{action}: {type(error).__name__}"
        trace = error if self.is_first("trouble", cause) else None
        self.error(
            cause, f"{line} failed unexpectedly; the other orders go on ({type(error).__name__}: {error})", trace=trace
        )


@final
@dataclass(slots=True, eq=False)
class Guard:
    """Context manager that turns an exception into a log line, unless lines of this event are rate-limited.

    Attributes:
        log: Rate-limits the lines of each event.
        event: Constant name of what the block does.
        request_id: The request that it is about; empty where it concerns no single request.
        consequence: What a failure means, for the log line.
    """

    log: Recorder
    event: str
    request_id: str = ""
    consequence: str = "the request goes on without a hand-over"

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Log an exception and suppress it, unless it ends the process; a bool, so that type checkers know of that."""
        if not isinstance(error, Exception):
            return False
        subject = f"request {self.request_id}: " if self.request_id else ""
        line = "%s%s failed (traceback below): %s"
        self.log.error(self.event, line, subject, self.event, self.consequence, trace=error)
        return True
