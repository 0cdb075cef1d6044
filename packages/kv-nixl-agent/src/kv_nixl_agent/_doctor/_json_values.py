"""JSON of files, of peers and of child processes: whatever comes becomes a value, or a `ValueError` that says what is wrong."""

from __future__ import annotations

import json
from typing import Final, cast

__all__ = ["parse_json"]

_MOST_LEVELS: Final = 32
"""A test region and ranks are described with four."""


def parse_json(text: str | bytes) -> object:
    """Return the value that a text stands for.

    Raises:
        ValueError: It is no JSON, or nested so deep that Python's own recursion would end on it.
    """
    try:
        value: object = json.loads(text)
    except RecursionError:
        value = None
        is_deep = True
    else:
        is_deep = _is_deep(value)
    if is_deep:
        raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
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
