"""Request ids that the production objects of an engine still hold, found by walking from object to object.

Nothing here knows which containers production has: every attribute of every production object is followed, so a list that is
added tomorrow is walked tomorrow. A container is named by the class and attribute that hold it, such as `LeaseTable._past`; `[]`
behind the name stands for its entries.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import Engine

_PRODUCTION = ("kv_handshake", "kv_nixl_agent", "kv_scheduler_state", "kv_topology", "vllm_adapter")
_LONG_TEXT = 64
_REQUEST = re.compile(r"(again)?\w*\d+(\.\d+)*-[pd]\d")
"""Beginning of a request's id, such as `r3-p1` or `again0.0.2-d1`; a transfer's id begins with its request's."""

_MEMORIES = {
    "LeaseTable._past[]": 1024,  # tells a late notification from an unknown one
    "HandOvers._read[]": 1024,  # tickets that were read to the end: a late child of n > 1 reads none of them
    "HandOverLog._events[]": 128 * 6,  # moments of the latest hand-overs, for `vllm-adapter trace`
}
"""Containers that may name requests that are over, and how many per rank; everything else forgets them."""


def kept_requests(engine: Engine) -> list[str]:
    """Return, in words, what still names requests although the engine is at rest and its metrics are taken."""
    for worker in engine.workers:
        worker.take_stats()
    engine.side.take_stats()
    listener: Any = engine.fleet.listeners.get(engine.fleet.place(engine.slot))
    found: list[str] = []
    for name, ids in sorted(_walk([engine.side, *engine.workers, getattr(listener, "listener", None)]).items()):
        most = (engine.plan.tp + 1) * _MEMORIES.get(name, 0)  # the scheduler's process counts as one more rank
        if len(ids) > most:
            found.append(f"{name} still names {len(ids)} requests, such as {min(ids)}; {most} at most")
    return found


def _walk(roots: list[Any]) -> dict[str, set[str]]:
    """Return the request ids that can be reached from some objects, by the name of the container."""
    found: dict[str, set[str]] = {}
    seen: set[int] = set()
    waiting: list[tuple[Any, str]] = [(root, "") for root in roots]
    while waiting:
        thing, name = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, str):
            if len(thing) <= _LONG_TEXT and _REQUEST.match(thing):
                found.setdefault(name, set()).add(thing)
        elif isinstance(thing, dict | list | tuple | deque | AbstractSet | MappingProxyType):
            inner = name if name.endswith("[]") else f"{name}[]"
            waiting += [(each, inner) for each in _entries(thing)]
        elif not isinstance(thing, type):
            waiting += _followed(thing, name)
    return found


def _entries(container: Any) -> list[Any]:
    if isinstance(container, Mapping):
        return [*container.keys(), *container.values()]
    return list(container)


def _followed(thing: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Yield what an object refers to, with names, if it is production's or a function."""
    if isinstance(thing, MethodType):
        yield thing.__self__, name
    elif isinstance(thing, partial):
        yield from ((each, f"{name}()") for each in (thing.func, *thing.args, *thing.keywords.values()))
    elif isinstance(thing, FunctionType):
        for cell in thing.__closure__ or ():
            try:
                yield cell.cell_contents, f"{thing.__qualname__}()"
            except ValueError:
                continue  # an empty cell
    elif type(thing).__module__.startswith(_PRODUCTION):
        yield from _attributes(thing)


def _attributes(thing: Any) -> Iterator[tuple[Any, str]]:
    owner = type(thing).__name__
    names: dict[str, None] = dict.fromkeys(vars(thing) if hasattr(thing, "__dict__") else ())
    for base in type(thing).__mro__:
        slots = base.__dict__.get("__slots__", ())
        names.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
    for attribute in names:
        mangled = f"_{owner}{attribute}" if attribute.startswith("__") and not attribute.endswith("__") else attribute
        if hasattr(thing, mangled):
            yield getattr(thing, mangled), f"{owner}.{attribute}"
