"""Step plans as bytes: documented JSON, version 1.

The document is an object with the key "version" (1) and one key per non-empty part of the plan, named like the
attribute. Orders, and the peers in them, are arrays of their attributes in the order of declaration; a missing tail
takes the defaults, and elements behind the known ones are ignored, so that a later minor version may append. Block
ids are arrays of arrays, an absent fence is null.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, cast

from kv_scheduler_state._errors import PlanDecodeError, quote
from kv_scheduler_state._peer import PeerAddress
from kv_scheduler_state._plan import FenceOrder, GrantOrder, HeartbeatOrder, ReadOrder, StepPlan

__all__ = ["PLAN_VERSION", "decode_plan", "encode_plan"]

PLAN_VERSION: Final = 1

_Reader = Callable[[object], object]


def encode_plan(plan: StepPlan) -> bytes:
    """Return a plan as version 1 JSON in UTF-8."""
    document: dict[str, object] = {"version": PLAN_VERSION}
    document.update((name, part) for name, part in zip(_PARTS, plan, strict=True) if part)
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def decode_plan(data: bytes) -> StepPlan:
    """Return the plan that a document stands for.

    Raises:
        PlanDecodeError: `plan-not-json`, `plan-version` or `plan-malformed`.
    """
    try:
        document: object = json.loads(data)
    except (ValueError, RecursionError, TypeError) as error:
        raise PlanDecodeError("plan-not-json", f"a step plan must be JSON in UTF-8: {error}") from None
    if not isinstance(document, dict):
        raise PlanDecodeError("plan-malformed", f"a step plan is {quote(document)}, must be an object")
    entries = cast("dict[str, object]", document)
    if entries.get("version") != PLAN_VERSION or type(entries["version"]) is not int:
        raise PlanDecodeError(
            "plan-version",
            f"a step plan has version {quote(entries.get('version'))}, this package reads {PLAN_VERSION}; "
            "run the same release in all processes of an engine",
        )
    parts = {name: _part(name, entries[name]) for name in _PARTS if name in entries}
    return StepPlan(**cast("dict[str, Any]", parts))


def _part(name: str, value: object) -> tuple[object, ...]:
    try:
        return tuple([_READERS[name](item) for item in _list(value)])
    except (TypeError, ValueError) as error:
        raise PlanDecodeError("plan-malformed", f"part '{name}' of a step plan: {error}", part=name) from None


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{quote(value)} where an array belongs")
    return cast("list[object]", value)


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{quote(value)} where a string belongs")
    return value


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{quote(value)} where an integer belongs")
    return value


def _boolean(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{quote(value)} where true or false belongs")
    return value


def _seconds(value: object) -> float:
    if type(value) is not float and type(value) is not int:
        raise TypeError(f"{quote(value)} where a number belongs")
    number = float(value) if abs(value) < 1e15 else 0.0
    if not number > 0:
        raise ValueError(f"{quote(value)} s, must be positive and finite")
    return number


def _integers(value: object) -> tuple[int, ...]:
    return tuple([_integer(item) for item in _list(value)])


def _blocks(value: object) -> tuple[tuple[int, ...], ...]:
    return tuple([_integers(item) for item in _list(value)])


def _texts(value: object) -> tuple[str, ...]:
    return tuple([_text(item) for item in _list(value)])


def _fence(value: object) -> tuple[int, int]:
    slot, generation = _integers(value)
    return slot, generation


def _optional(reader: _Reader) -> _Reader:
    return lambda value: None if value is None else reader(value)


def _save(value: object) -> tuple[str, tuple[tuple[int, ...], ...]]:
    request_id, blocks = _list(value)
    return _text(request_id), _blocks(blocks)


def _order(order_type: type[Any], *readers: _Reader) -> _Reader:
    required = len(order_type._fields) - len(order_type._field_defaults)

    def read(value: object) -> object:
        items = _list(value)
        if len(items) < required:
            raise ValueError(f"{order_type.__name__} has {len(items)} values, at least {required} are needed")
        return cast("object", order_type(*[reader(item) for reader, item in zip(readers, items, strict=False)]))

    return read


_PARTS: Final = StepPlan._fields
_optional_integer: Final = _optional(_integer)
_peer: Final = _order(
    PeerAddress,
    *(_text, _text),
    *(_integer, _integer, _integer, _integer),
    *(_optional_integer, _optional_integer, _optional_integer),
)
_READERS: Final[dict[str, _Reader]] = {
    "reads": _order(
        ReadOrder,
        *(_text, _peer, _text),
        *(_blocks, _blocks),
        *(_optional(_fence), _optional(_seconds)),
        _boolean,
        _integer,
        _integers,
    ),
    "fences": _order(FenceOrder, _text, _integer, _integer),
    "grants": _order(GrantOrder, _text, _seconds, _optional(_fence)),
    "releases": _text,
    "saves": _save,
    "heartbeats": _order(HeartbeatOrder, _peer, _texts),
    "expects": _text,
    "revokes": _text,
    "cancels": _text,
}
