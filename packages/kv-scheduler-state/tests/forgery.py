"""Tickets that were tampered with, without knowledge of a secret."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["tampered_tickets"]

Params = dict[str, Any]

_HARMLESS = frozenset(("remote_registration_generation",))
"""Keys that a reader ignores beside `kv_generation`; all others are acted upon."""


def _other_blocks(lists: list[list[int]]) -> Iterator[list[list[int]]]:
    for group, ids in enumerate(lists):
        for index in {0, len(ids) - 1} if ids else ():
            changed = copy.deepcopy(lists)
            changed[group][index] += 1
            yield changed
        if len(ids) > 1:
            for kept in (ids[:-1], ids[1:], ids[::-1]):
                changed = copy.deepcopy(lists)
                changed[group] = list(kept)
                yield changed
        yield [[*each, 9] if number == group else list(each) for number, each in enumerate(lists)]


def _changes(key: str, value: object) -> Iterator[object]:
    """Yield other values of a key that a reader would take, or could be made to take."""
    if key == "remote_block_ids":
        yield from _other_blocks(cast("list[list[int]]", value))
    elif isinstance(value, bool):
        return
    elif isinstance(value, int):
        yield from (value + 1, value - 1 if value > 1 else value + 2, None)
    elif isinstance(value, float):
        yield from (value + 0.5, value * 2, None)
    elif isinstance(value, str):
        flipped = ("0" if value[:1] != "0" else "1") + value[1:]
        yield from (flipped, value[:-1], value + "0", None)
    elif isinstance(value, list):
        numbers = cast("list[int]", value)
        for index, each in enumerate(numbers):
            yield [*numbers[:index], each + 1, *numbers[index + 1 :]]
        yield None
    else:
        yield 7.0 if key == "remote_blocks_expiry_time" else 1


def tampered_tickets(params: Params) -> Iterator[tuple[str, Params]]:
    """Yield (description, ticket) for each key of a ticket that a consumer acts on, changed without knowledge of a secret."""
    for key, value in params.items():
        if key in _HARMLESS or key in {"do_remote_prefill", "do_remote_decode"}:
            continue
        for number, other in enumerate(_changes(key, value)):
            yield f"{key} #{number}", {**copy.deepcopy(params), key: other}
        yield f"{key} cut", {name: each for name, each in copy.deepcopy(params).items() if name != key}
    flipped = copy.deepcopy(params)
    flipped["do_remote_prefill"], flipped["do_remote_decode"] = (
        params["do_remote_decode"],
        params["do_remote_prefill"],
    )
    yield "direction", flipped
