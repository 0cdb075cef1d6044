"""Values that commands take and print: JSON of files, standard input, sockets and other commands, and numbers of options.

Whatever is read becomes a value or one coded error: bytes that are not text, text that is not JSON, nesting that would exceed
Python's recursion, and numbers that cannot be waited for.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

from vllm_adapter.errors import AdapterError, ConfigurationError
from vllm_adapter.observe.cause_log import plain_text

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = [
    "Folder",
    "coded_errors",
    "json_text",
    "misfit",
    "parse_json",
    "read_text",
    "seconds",
    "source_name",
    "within",
]

Folder = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Where the sockets are; default: where this user's engines put them."),
]
"""Option `--folder` of the commands that ask live engines."""
_USAGE = 2
_LEAST_S = 0.001
_MOST_S = 3600.0

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


def misfit(value: object, shape: Any) -> str:  # noqa: ANN401 - any type that msgspec knows
    """Return the first field that has another shape, with what it must be; nothing if there is none.

    Example: ``Expected `object | null`, got `int` - at `$.thread` ``.
    """
    try:
        msgspec.convert(value, shape)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half of a surrogate pair is no text
        return str(error)
    return ""


def seconds(option: str, given: float, *, least_s: float = _LEAST_S) -> float:
    """Return a time that an option gives, of an hour at most.

    Raises:
        ConfigurationError: `out-of-range`.
    """
    return within(option, given, least_s, _MOST_S, "s")


def within(option: str, given: float, least: float, most: float, unit: str) -> float:
    """Return a number that an option gives.

    Raises:
        ConfigurationError: `out-of-range`: it lies outside, or is NaN.
    """
    if not least <= given <= most:
        raise ConfigurationError(
            f"{option} must be {least:g} {unit} at least and {most:g} {unit} at most, got {given:g}",
            code="out-of-range",
        )
    return given


@contextmanager
def coded_errors(command: str) -> Generator[None]:
    """End a command with a line on standard error and the exit code of wrong usage where the block raises a coded error."""
    try:
        yield
    except AdapterError as error:
        print(f"vllm-adapter {command}: {plain_text(str(error))} ({error.code})", file=sys.stderr)
        raise typer.Exit(_USAGE) from None
