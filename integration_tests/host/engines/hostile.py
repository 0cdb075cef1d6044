"""Tickets that a hostile client might send, drawn from a grammar around a real one."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["derived_ticket"]

_PREFIXES = ("HB:", "PUSH_REG:", "KVH:", "hb:", "HB", ":", "HB:HB:")
_WORDS = (
    "x",
    "",
    "\u0000",
    "ü",
    "漢字",
    "\u202eabc",
    "e\u0301",
    "😀",
    "\ud800",
    "a:b",
    "a,b",
    '"',
    "\n",
    "%00",
    "../..",
    "x" * 5000,
)
_NUMBERS = (
    0, -1, 1, 2**31, 2**32, 2**53 - 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 2**100,
    0.5, 2.0**53, 1e308, True,
)  # fmt: skip
_SECRETS = ("kv_nonce", "kv_fence", "kv_prompt")
"""Of these a stranger knows none: whoever has them holds the ticket itself."""


def _an_id(draw: random.Random, live: str) -> object:
    """Return an id: a reserved prefix before a word or a live request's id, an id close to that, or no id at all."""
    prefix, word = draw.choice(_PREFIXES), draw.choice(_WORDS)
    return draw.choice(
        [
            prefix + word,
            prefix + live,
            live,
            live + word,
            live[:-1],
            live.upper(),
            word,
            f"{live}:1",
            draw.choice(_NUMBERS),
            [live],
        ]
    )


def _a_number(draw: random.Random) -> object:
    number = draw.choice(_NUMBERS)
    return draw.choice(
        [number, number, str(number), [number], {"slot": number, "generation": number}, [number, number]]
    )


def _blocks(draw: random.Random, real: Any) -> object:
    """Return block lists: too few, too many, in another order, repeated, or with numbers that no cache has."""
    group = list(real[0]) if real and real[0] else [0]
    shuffled = draw.sample(group, len(group))
    number = draw.choice(_NUMBERS)
    return draw.choice(
        [
            [],
            [[]],
            [group[:-1]],
            [[*group, 0]],
            [[*group, number]],
            [shuffled],
            [group[:1] * len(group)],
            [group, group],
            [[number]],
        ]
    )


def _leaf(draw: random.Random, key: str, value: Any, live: str) -> object:
    if key in {"remote_request_id", "remote_engine_id"}:
        return _an_id(draw, live)
    if key == "remote_block_ids":
        return _blocks(draw, value)
    if key == "remote_host":  # never one that lets packets disappear: each would cost a deadline
        return draw.choice(["127.0.0.1", "::1", "127.0.0.2", *_WORDS[:6], *_NUMBERS[:3]])
    if isinstance(value, str):
        return draw.choice([*_WORDS, value[:-1], value + "0", value.upper()])
    if isinstance(value, list) and value:
        return [_leaf(draw, key, item, live) for item in value]
    if isinstance(value, dict) and value:
        return {name: _leaf(draw, name, item, live) for name, item in value.items()}
    return _a_number(draw)


def derived_ticket(draw: random.Random, others: dict[str, Any], live: str) -> dict[str, Any]:
    """Return a ticket to send with a prompt that it was not made for.

    Args:
        draw: Where chance comes from.
        others: A real ticket of another prompt, whose owner will not use it.
        live: Id of a request whose owner is about to use its ticket. Ids are no secrets; the rest of that ticket is.
    """
    ticket = dict(others)
    kind = draw.randrange(4)
    if kind == 0:  # as it is
        return ticket
    if kind == 1:  # the id of a live request, without what only its owner knows
        for secret in _SECRETS:
            if draw.random() < 0.7:
                ticket.pop(secret, None)
        return {**ticket, "remote_request_id": live}
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(["remote_request_id", *ticket])
        if key in ticket and draw.random() < 0.15:
            del ticket[key]
        else:
            ticket[key] = _leaf(draw, key, ticket.get(key), live)
    return ticket
