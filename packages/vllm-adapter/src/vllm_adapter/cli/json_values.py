"""JSON that commands read, from files, standard input, sockets and other commands, and JSON that they print.

Whatever is read, it becomes a value or one coded error: bytes that are no text, text that is no JSON, and nesting on which
Python's own recursion, or that of whoever goes through the value later, would end.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import cast

from vllm_adapter.errors import AdapterError

__all__ = ["json_text", "parse_json", "read_text", "source_name"]

_MOST_LEVELS = 64
"""Engines answer, and are configured, with less than ten."""


def source_name(source: str) -> str:
    """Return what a message calls the source of a configuration: its file, standard input, or only `the configuration`."""
    return "the configuration" if _is_text(source) else "standard input" if source == "-" else source


def read_text(source: str) -> str:
    """Return the text of a source: the words themselves, a file's content, or standard input for `-`.

    Raises:
        AdapterError: `unreadable`.
    """
    if _is_text(source):
        return source
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise AdapterError(f"{source_name(source)} is no UTF-8 text: {error}", code="unreadable") from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise AdapterError(f"{source_name(source)} cannot be read: {error}", code="unreadable") from error


def _is_text(source: str) -> bool:
    """Return whether words are JSON themselves: no file name of an operator begins as a JSON object or list does."""
    return source.lstrip()[:1] in {"{", "["}


def parse_json(text: str | bytes, name: str) -> object:
    """Return the value that a text stands for.

    Args:
        text: The text.
        name: Its source, for the error.

    Raises:
        AdapterError: `unreadable`.
    """
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise AdapterError(f"{name} is no JSON: {error}", code="unreadable") from error
    except RecursionError:
        value = None
        is_deep = True
    else:
        is_deep = _is_deep(value)
    if is_deep:
        raise AdapterError(f"{name} is nested more than {_MOST_LEVELS} levels deep", code="unreadable")
    return value


def _is_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(_MOST_LEVELS):
        level = [child for each in level for child in _children(each)]
        if not level:
            return False
    return True


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[object, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return JSON that any program reads: a number that JSON does not know, as NaN, is null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(value), indent=indent)


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in cast("dict[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in cast("list[object]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
