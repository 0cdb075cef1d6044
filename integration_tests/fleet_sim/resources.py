"""Sizes of all containers that the production objects of an engine hold, found by walking from object to object.

Nothing here knows which containers production has. Every attribute of every production object is followed; a container is named
by the class and attribute that hold it, such as `LeaseTable._past`, and all containers of a name are added up over the engine's
ranks. So a list that somebody adds tomorrow is measured tomorrow.

Example: two ranks whose lease tables remember 3 and 5 ended leases: `LeaseTable._past` is 8. A dict of lists counts under two
names: `Peers.lines` for its keys, `Peers.lines[]` for the entries of all its lists.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from engine import Engine

__all__ = ["Contents", "contents_of", "kept_requests", "walk"]

_PRODUCTION = ("kv_handshake", "kv_nixl_agent", "kv_scheduler_state", "kv_topology", "vllm_adapter")
_LONG_TEXT = 64
_REQUEST = re.compile(r"(again)?\w*\d+(\.\d+)*-[pd]\d")
"""Beginning of a request's id, such as `r3-p1` or `again0.0.2-d1`; a transfer's id begins with its request's."""
_ATOMS = (int, float, complex, bool, type(None), type, type(threading), type(threading.Lock()))


_MEMORIES = {
    "LeaseTable._past[]": 1024,  # `remembered_ends`: tells a late notification from an unknown one
    "HandOvers._read[]": 1024,  # tickets that were read to the end: a late child of n > 1 reads none of them
    "HandOverLog._events[]": 128 * 6,  # moments of the latest hand-overs, for `vllm-adapter trace`
}
"""Containers that may name requests that are over, and how many per rank; everything else forgets them."""


def kept_requests(engine: Engine) -> list[str]:
    """Return, in words, what still names requests although the engine is at rest."""
    found: list[str] = []
    for name, ids in sorted(contents_of(engine).requests.items()):
        most = (engine.plan.tp + 1) * _MEMORIES.get(name, 0)  # the scheduler's process counts as one more rank
        if len(ids) > most:
            found.append(f"{name} still names {len(ids)} requests, such as {min(ids)}; {most} at most")
    return found


def contents_of(engine: Engine) -> Contents:
    """Return what an engine's production objects hold, after its host has taken the metrics of its steps."""
    for worker in engine.workers:
        worker.take_stats()
    engine.side.take_stats()
    listener: Any = engine.fleet.listeners.get(engine.fleet.place(engine.slot))
    return walk([engine.side, *engine.workers, *([listener.listener] if listener is not None else [])])


@final
@dataclass(slots=True)
class Contents:
    """Sizes of all containers by name, the characters of long texts under `NAME text`, and the request ids found, by name."""

    sizes: Counter[str] = field(default_factory=Counter[str])
    requests: dict[str, set[str]] = field(default_factory=dict[str, set[str]])


def walk(roots: list[Any]) -> Contents:
    """Return everything that can be reached from some objects."""
    found = Contents()
    sizes = found.sizes
    seen: set[int] = set()
    waiting: list[tuple[Any, str]] = [(root, "") for root in roots]
    while waiting:
        thing, name = waiting.pop()
        if isinstance(thing, _ATOMS) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, str | bytes | bytearray):
            if len(thing) > _LONG_TEXT:
                sizes[f"{name} text"] += len(thing)
            elif isinstance(thing, str) and _REQUEST.match(thing):
                found.requests.setdefault(name, set()).add(thing)
        elif isinstance(thing, dict | list | tuple | deque | AbstractSet | MappingProxyType):
            sizes[name] += len(thing)
            inner = name if name.endswith("[]") else f"{name}[]"
            waiting += [(each, inner) for each in _entries(thing)]
        else:
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
