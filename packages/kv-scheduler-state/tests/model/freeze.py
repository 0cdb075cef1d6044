"""Keys of states without a list of their parts: all that an object holds, except constants and records of the past."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, cast

from kv_scheduler_state.clock import ObservedClock
from kv_scheduler_state.config import GroupConfig, SchedulerConfig
from kv_scheduler_state.tables import Table, Transition
from kv_scheduler_state.ticket.reader import TicketReader
from kv_scheduler_state.ticket.seal import TicketSeal
from kv_scheduler_state.values import BlockRules

_CONSTANT: Final = (
    *(Table, Transition, SchedulerConfig, GroupConfig, BlockRules, TicketReader, TicketSeal, ObservedClock),
    MappingProxyType,
)
_LEFT_OUT: Final = frozenset(
    {
        "born_s",
        "last_delay_s",
        "_past",
        "_used",
        "_draws",
        "_nonces",
        "_address",
        "_outcomes",
        "last_word",
        "cause",
        "opposite",
    }
)
"""The past, constants, names that are yet to be given, reasons that only people read, and the other engine of a pair, which has a
key of its own."""
_PREFIXES: Final = ("__", "on_", "_on_")
"""Of names in Python, and of rows by state."""
_SLOTS: Final[dict[type[object], tuple[str, ...]]] = {}
_PLAIN: Final = frozenset((str, int, float, bool, bytes, type(None)))


def freeze(value: object) -> object:
    """Return a value whose text is equal for objects with equal parts; an object that was met before is named by its turn."""
    return _frozen(value, {})


def _frozen(value: object, met: dict[int, int]) -> object:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, _CONSTANT) or callable(value):
        return ""
    if isinstance(value, tuple):
        return tuple([_frozen(each, met) for each in cast("tuple[object, ...]", value)])
    if id(value) in met:
        return met[id(value)]
    met[id(value)] = len(met)
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return [(_frozen(key, met), _frozen(each, met)) for key, each in items]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, cast("set[object]", value)))
    if isinstance(value, list) or type(value).__module__ == "collections":
        return [_frozen(each, met) for each in cast("list[object]", value)]
    return [_frozen(each, met) for each in _parts(value)]


def _parts(value: object) -> list[object]:
    names = _slots(type(value))
    if hasattr(value, "__dict__"):
        kept = [name for name in vars(value) if name not in _LEFT_OUT and not name.startswith(_PREFIXES)]
        names = (*names, *kept)
    return [getattr(value, name, None) for name in names]


def _slots(kind: type[object]) -> tuple[str, ...]:
    names = _SLOTS.get(kind)
    if names is None:
        found = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
        names = tuple([name for name in found if name not in _LEFT_OUT and not name.startswith(_PREFIXES)])
        _SLOTS[kind] = names
    return names
