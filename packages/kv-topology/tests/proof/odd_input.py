"""Odd values in every place of a document, and what a command that reads it prints; other packages' tests use it too."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any


class _Stream(io.TextIOWrapper):
    """A stream of a program, whose bytes are kept."""

    def __init__(self, errors: str) -> None:
        self.kept = io.BytesIO()
        super().__init__(self.kept, encoding="utf-8", errors=errors)

    def text(self) -> str:
        self.flush()
        return self.kept.getvalue().decode()


def captured(command: Callable[[], int]) -> tuple[int, str, str]:
    """Run a command as a program is run; return its exit code and the text of both streams."""
    out, err = _Stream("strict"), _Stream("backslashreplace")
    with redirect_stdout(out), redirect_stderr(err):
        code = command()
    return code, out.text(), err.text()


def places(value: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry of nested dictionaries and lists."""
    inside: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inside:
        yield (*at, key)
        yield from places(child, (*at, key))


def put(value: Any, path: tuple[Any, ...], odd: object) -> Any:
    """Return a copy of nested dictionaries and lists with another value at a path."""
    made = inner = copy.deepcopy(value)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return made
