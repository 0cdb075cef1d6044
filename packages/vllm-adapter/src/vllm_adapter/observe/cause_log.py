"""Log lines and terminal texts that clients and peers can cause: limited per cause, and free of control characters."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CauseLog", "plain_text", "short_text", "tag_lines"]

# A child of the host's logger, so that its format and level apply.
_logger = logging.getLogger("vllm.vllm_adapter")

_LINES = 10
_PERIOD_S = 10.0
_TAG = "kv-transfer: "
_MOST_CHARS = 2000
_MOST_CAUSES = 256
"""Most causes that are told apart; codes are few, and all further ones count as one cause."""


@dataclass(slots=True)
class _Period:
    began_s: float
    lines: int = 0
    held_back: int = 0


@final
class CauseLog:
    """Logs at most ten lines per cause and ten seconds; the next line of the cause says how many were held back.

    Example: 300 forged tickets in 2 s, all refused as ``ticket-seal``, make 10 lines. The 301st, 11 s after the first, is logged
    with "290 more like this were not logged". Any thread.

    Values other than numbers may be texts of clients and peers. Each is cut to 2000 characters, and unprintable characters are
    escaped: a newline would start a line that this engine never wrote, and an escape sequence could command a terminal.

    Args:
        now_s: The monotonic clock.
        is_lead: Whether this is the rank that warns on behalf of all ranks of its engine, as `Recorder` has it.
    """

    def __init__(self, now_s: Callable[[], float], *, is_lead: bool = True) -> None:
        self._now_s = now_s
        self._warning_level = logging.WARNING if is_lead else logging.INFO
        self._periods: dict[str, _Period] = {}
        self._lock = threading.Lock()

    def info(self, cause: str, text: str, *values: object) -> None:
        """Log an event of normal life under the same limit."""
        self._log(logging.INFO, cause, text, values)

    def warning(self, cause: str, text: str, *values: object) -> None:
        """Log a warning unless its cause has used up its lines. A cause is a code, never a request, a peer or a peer's text."""
        self._log(self._warning_level, cause, text, values)

    def error(self, cause: str, text: str, *values: object, trace: BaseException | str | None = None) -> None:
        """Log a failure under the same limit, with its traceback if given; lines of a cause count together at any level.

        The lines of a traceback given as text are indented, so that none of them looks like a line of the log.
        """
        self._log(logging.ERROR, cause, text, values, trace)

    def _log(
        self,
        level: int,
        cause: str,
        text: str,
        values: tuple[object, ...],
        trace: BaseException | str | None = None,
    ) -> None:
        with self._lock:
            held_back = self._admit(cause)
        if held_back is None:
            return
        shown = [value if isinstance(value, int | float) else short_text(str(value)) for value in values]
        more = f"; {held_back} more like this were not logged" if held_back else ""
        if isinstance(trace, str):
            more += "".join(f"\n    {plain_text(line)}" for line in trace.splitlines())
            trace = None
        line = f"{text}%s"
        _logger.log(level, line, *shown, more, exc_info=trace)

    def _admit(self, cause: str) -> int | None:
        """Return how many lines were held back before this one; None if this line is held back, too."""
        now_s = self._now_s()
        if cause not in self._periods and len(self._periods) >= _MOST_CAUSES:
            cause = ""
        period = self._periods.get(cause)
        held_back = 0
        if period is None or now_s - period.began_s >= _PERIOD_S:
            held_back = period.held_back if period is not None else 0
            period = self._periods[cause] = _Period(now_s)
        if period.lines >= _LINES:
            period.held_back += 1
            return None
        period.lines += 1
        return held_back


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
    """Prefix every log line of this package with `kv-transfer: `; once per process."""
    if not any(isinstance(known, _Tag) for known in _logger.filters):
        _logger.addFilter(_Tag())


def plain_text(text: str) -> str:
    """Return a text with its control characters escaped, because they could start another line or command a terminal."""
    return text if text.isprintable() else "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])


def short_text(text: str) -> str:
    """Return a plain text of at most 2000 characters, with a note of its length if it was longer."""
    plain = plain_text(text[:_MOST_CHARS])[:_MOST_CHARS]
    return plain if len(text) <= _MOST_CHARS else f"{plain}... ({len(text)} characters)"
