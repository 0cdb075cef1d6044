"""Files of a dry run: any content becomes a value or `spec-malformed`, and no other error."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING, cast

from kv_topology._errors import InvalidGeometry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["malformed", "read_json", "read_spec"]

_MOST_LEVELS = 32
"""A specification has three, a model's configuration five."""


def malformed(message: str) -> InvalidGeometry:
    """Return the error of a malformed specification."""
    return InvalidGeometry(message, code="spec-malformed")


def read_spec(path: Path) -> object:
    """Return the content of a specification: JSON under the name `*.json`, otherwise TOML.

    Raises:
        InvalidGeometry: `spec-malformed`.
    """
    return _read(path, json.loads if path.suffix == ".json" else tomllib.loads)


def read_json(path: Path) -> object:
    """Return the content of a JSON file of any name.

    Raises:
        InvalidGeometry: `spec-malformed`.
    """
    return _read(path, json.loads)


def _read(path: Path, parse: Callable[[str], object]) -> object:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise malformed(f"{path} is no UTF-8 text: {error}.") from None
    except OSError as error:
        raise malformed(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:  # a name that no file can have
        raise malformed(f"{str(path)!r} cannot be read: {error}.") from None
    try:
        value = parse(text)
    except ValueError as error:
        raise malformed(f"{path} does not parse: {error}.") from None
    except RecursionError:
        value = None
        is_deep = True
    else:
        is_deep = _is_deep(value)
    if is_deep:
        raise malformed(f"{path} is nested more than {_MOST_LEVELS} levels deep.")
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
