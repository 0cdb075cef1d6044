"""A pytest plug-in: note the texts that users would see while tests run, and fail if one is not in `docs/messages.md`.

The page is made from the source by rules about syntax (`texts.py`). This looks from the other side: at the texts of coded errors,
at the records of the packages' loggers, and at what the commands print, in the runs of the packages' own tests. So a text that
the rules overlook is found as soon as a test provokes it. `dev.py test --long` loads this for the packages and the tools.

An error or a record counts by the line that made it, the first few of each. Of what commands print, lines of plain words count:
no JSON, no rows of tables, no pages of help, which the terminal's width breaks.
"""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, final

import pytest

from kvdev.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Templates", "pytest_collection_finish", "pytest_sessionfinish", "pytest_terminal_summary"]

_PAGE = ROOT / "docs" / "messages.md"
_ERRORS = (
    ("kv_handshake._errors", "HandshakeError"),
    ("kv_topology._errors", "TopologyError"),
    ("kv_nixl_agent._errors", "AgentError"),
    ("kv_scheduler_state._errors", "SchedulerStateError"),
    ("vllm_adapter.errors", "AdapterError"),
)
_MODULES = ("kv_handshake", "kv_topology", "kv_nixl_agent", "kv_scheduler_state", "vllm_adapter")
_OURS = re.compile(rf"/({'|'.join(_MODULES)})/(?!testing)")
_ON_THE_WAY = re.compile(r"/(seen_texts|_?errors|_log|cause_log|recorder|contextlib)\.py$|/logging/")
"""Files through which errors and records come."""
_LOGGERS = ("kv_", "vllm.vllm_adapter")
_VALUE = re.compile(r"\{[^{}]*\}|%(?:\.\d+)?[a-z]")
_WORD = re.compile(r"(?<![\w/.'-])[a-z]{2,}(?![\w/=-])")
_SENTENCE = re.compile(r"(^|\s)[a-z]{2,} [a-z]+ [a-z]{2,} [a-z]+")
_COLUMNS = re.compile(r"\S {3,}\S")
_ENDING = re.compile(r"; \d+ more like this were not logged$| \([^()]*\)$")
"""Number of lines that were held back, a message's code, or whose it is, as in `(engine 'P')`."""
_MOST_OF_A_PLACE = 8
_MOST_CHARS = 4000
_MOST_WORDS_OF_A_NAME = 2
_NAMED = 20


@final
class Templates:
    """The texts of the page, to be compared with texts that were seen.

    Example: `peer {peer} is gone` is the template of `peer 10.0.0.1 is gone`. A text may also be several that `; ` joins, and
    have a name before a colon, `kv-handshake: peer 10.0.0.1 is gone`, or that of a field before all: `block_lens has 1 entries`.
    """

    def __init__(self, page: str) -> None:
        split = ([part.strip() for part in _VALUE.split(cell)] for cell in _cells(page))
        self._all = [parts for parts in split if len(re.findall("[A-Za-z]{2,}", " ".join(parts))) > 1]

    def know(self, text: str) -> bool:
        """Return whether a text is made of templates."""
        plain = " ".join(text.split())
        endless = _ENDING.sub("", plain)
        if any(_fits(plain, parts) or _fits(endless, parts) for parts in self._all):
            return True
        field, _, rest = plain.partition(" ")
        if "_" in field and any(_fits(rest, parts) for parts in self._all):
            return True
        name, colon, rest = plain.partition(": ")
        if colon and len(_WORD.findall(name)) <= _MOST_WORDS_OF_A_NAME and self.know(rest):
            return True
        first, semicolon, rest = plain.partition("; ")
        return bool(semicolon) and self.know(first) and self.know(rest)


def _cells(page: str) -> Iterator[str]:
    """Yield the texts of the page's tables: the third column of four, or the only one."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) in {1, 4}:
            yield cells[len(cells) // 2].replace("\\|", "|").replace("&lt;", "<").replace("%%", "%")


def _fits(text: str, parts: list[str]) -> bool:
    """Return whether a text is these parts in order with values between them."""
    first, *rest = parts
    if not text.startswith(first):
        return False
    at = len(first)
    for number, part in enumerate(rest, 1):
        at = len(text) - len(part) if number == len(rest) and part and text.endswith(part) else text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return at == len(text) or not parts[-1]


@final
class _Seen:
    """Texts that were seen, a few of each place in the source."""

    def __init__(self) -> None:
        self._counts: Counter[object] = Counter()
        self.texts: dict[str, str] = {}

    def note(self, text: str, place: str) -> None:
        self._counts[place] += 1
        if self._counts[place] <= _MOST_OF_A_PLACE and len(text) <= _MOST_CHARS:
            self.texts.setdefault(text, place)

    def note_output(self, output: object, place: str) -> None:
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        if isinstance(text, str) and "Usage: " not in text and "Traceback (" not in text and "\x1b" not in text:
            for line in text.splitlines():
                is_row = _COLUMNS.search(line) is not None
                if line[:1] not in {"{", "[", " ", "|"} and not is_row and _SENTENCE.search(line):
                    self.texts.setdefault(line, place)


_SEEN = _Seen()


def _place_of_caller() -> str:
    """Return where in the packages an error or a record is made; empty for one that a test makes."""
    frame = inspect.currentframe()
    while frame is not None and _ON_THE_WAY.search(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or not _OURS.search(frame.f_code.co_filename):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _watch_errors() -> None:
    for module, name in _ERRORS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            _wrap_init(kind)


def _wrap_init(kind: Any) -> None:
    inner: Callable[..., None] = kind.__init__

    def init(error: Exception, *words: object, **named: object) -> None:
        inner(error, *words, **named)
        if place := _place_of_caller():
            _SEEN.note(str(error), place)

    kind.__init__ = init


def _watch_records() -> None:
    handle = logging.Logger.handle

    def watched(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.name.startswith(_LOGGERS) and (place := _place_of_caller()):
            _SEEN.note(record.getMessage(), place)
        handle(logger, record)

    kind: Any = logging.Logger
    kind.handle = watched


def _watch_output(capture: Any) -> None:
    read: Callable[..., Any] = capture.readouterr

    def readouterr(fixture: Any) -> Any:
        said = read(fixture)
        for output in said:
            _SEEN.note_output(output, "a command in a test's process")
        return said

    capture.readouterr = readouterr


def _watch_processes() -> None:
    start = subprocess.run

    def run(command: Any, **named: Any) -> Any:
        ended = start(command, **named)
        words = [str(word) for word in command] if isinstance(command, list) else []
        if any(word.startswith(_MODULES) for word in words):
            for output in (ended.stdout, ended.stderr):
                _SEEN.note_output(output, " ".join(words)[-200:])
        return ended

    module: Any = subprocess
    module.run = run


def pytest_collection_finish() -> None:
    """Begin to watch, once the tests have imported what they test."""
    _watch_errors()
    _watch_records()
    _watch_output(pytest.CaptureFixture)
    _watch_processes()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that saw a text which is not on the page."""
    if _unknown() and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which texts are not on the page."""
    unknown = _unknown()
    if unknown:
        terminalreporter.write_line(
            f"{len(unknown)} texts that users saw are not in docs/messages.md; see tools/kvdev/site/texts.py:"
        )
    for text, place in sorted(unknown.items())[:_NAMED]:
        terminalreporter.write_line(f"  {text[:300]!r} of {place}")
    terminalreporter.write_line(f"{len(_SEEN.texts)} texts that users saw were compared with docs/messages.md")


@cache
def _unknown() -> dict[str, str]:
    templates = Templates(_PAGE.read_text(encoding="utf-8"))
    return {text: place for text, place in _SEEN.texts.items() if not templates.know(text)}
