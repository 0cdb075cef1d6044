"""Values that commands take and print: JSON of files, standard input and sockets, and numbers of options.

Whatever is read becomes a value or one coded error: bytes that are not text, text that is not JSON, nesting that would exceed
Python's recursion, and numbers that cannot be waited for.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

from vllm_adapter.errors import AdapterError, ConfigurationError
from vllm_adapter.observe.recorder import plain_text

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Folder", "Json", "Timeout", "json_text", "parse_json", "read_json", "say", "within", "wrapped"]

_MOST_LEVELS = 64
"""Engines answer, and are configured, with less than ten."""


def within(least: float, most: float, unit: str) -> Callable[[typer.CallbackParam, float | None], float | None]:
    """Return the callback of an option whose number must lie within bounds; it raises `out-of-range`, also for NaN."""

    def check(option: typer.CallbackParam, given: float | None) -> float | None:
        if given is not None and not least <= given <= most:
            raise ConfigurationError(
                f"{option.opts[0]} must be {least:g} {unit} at least and {most:g} {unit} at most, got {given:g}",
                code="out-of-range",
            )
        return given

    return check


Folder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Where the sockets are; default: where this user's engines put them."),
]
"""Option `--folder` of the commands that ask live engines."""
Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="Longest wait for an answer.", callback=within(0.001, 3600, "s"))
]
"""Option `--timeout`."""
Json = Annotated[bool, typer.Option("--json", help="The result as JSON.")]
"""Option `--json`."""


def say(command: str, text: str) -> None:
    """Print a line on standard error."""
    print(f"vllm-adapter {command}: {plain_text(text)}", file=sys.stderr)


def wrapped(text: str, head: str) -> str:
    """Return a text wrapped to the terminal's width, beside a head of fixed width on its first line."""
    width = max(60, shutil.get_terminal_size().columns)
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def read_json(source: str, shape: Any = object) -> object:  # noqa: ANN401 - any type that msgspec knows
    """Return a value that an operator gives: as JSON text, as the name of a file with it, or `-` for standard input.

    Raises:
        AdapterError: `unreadable` or `not-json`.
    """
    # No file name of an operator begins as a JSON object or list does.
    is_text = source.lstrip()[:1] in {"{", "["}
    name = "the configuration" if is_text else "standard input" if source == "-" else source
    try:
        text = source if is_text else sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise AdapterError(f"{name} is not UTF-8 text: {error}", code="unreadable") from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise AdapterError(f"{name} cannot be read: {error}", code="unreadable") from error
    return parse_json(text, name, shape)


def parse_json(text: str | bytes, name: str, shape: Any = object) -> object:  # noqa: ANN401 - any type that msgspec knows
    """Return the value of a JSON text, as it is; `name` is its source, for the error.

    Raises:
        AdapterError: `not-json`, or `unreadable` for another shape, with the first field that differs.
    """
    try:
        value: object = json.loads(text)
        is_deep = _is_deep(value, _MOST_LEVELS)
    except ValueError as error:
        raise AdapterError(f"{name} is not JSON: {error}", code="not-json") from error
    except RecursionError:
        value, is_deep = None, True
    if is_deep:
        raise AdapterError(f"{name} is nested more than {_MOST_LEVELS} levels deep", code="not-json")
    try:
        msgspec.convert(value, shape)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half of a surrogate pair cannot be encoded
        raise AdapterError(f"{name} has another shape than in this version: {error}", code="unreadable") from error
    return value


def _is_deep(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(cast("dict[str, object]", value).values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deep(child, levels - 1) for child in cast("list[object]", value))


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return JSON that any program reads: a number that JSON does not know, as NaN, is null."""
    plain: object = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(plain, indent=indent)
