"""Output of NIXL, UCX and child processes, kept out of a report: they write to descriptors 1 and 2, not to Python's streams."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Captured", "captured_output", "reason_in"]

_REASONS: Final = (
    re.compile(r"Failed to create UCX context [^:]*: (.+)"),
    re.compile(r"Unexpected UCX error: (.+)"),
    re.compile(r"\bAgentError: (.+)"),
    re.compile(r"\b(\w+(?:Error|Exception): .+)"),
)
"""Sentences that say why NIXL or UCX did not start, those nearest to the cause first."""


@final
@dataclass(slots=True)
class Captured:
    """Text that was written; complete once the block has been left."""

    text: str = field(default="")


@contextlib.contextmanager
def captured_output() -> Generator[Captured]:
    """Collect all that this process and its children write to standard output and standard error."""
    captured = Captured()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with tempfile.TemporaryFile() as sink:
        saved = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in saved:
                os.dup2(sink.fileno(), number)
            yield captured
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, copy in saved:
                os.dup2(copy, number)
                os.close(copy)
            sink.seek(0)
            captured.text = sink.read().decode(errors="replace")


def reason_in(log: str) -> str:
    """Return the sentence of a log that is nearest to the cause of a failure; its last line where none is known, "" for none."""
    for pattern in _REASONS:
        found = pattern.search(log)
        if found is not None:
            return found.group(1).strip()
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""
