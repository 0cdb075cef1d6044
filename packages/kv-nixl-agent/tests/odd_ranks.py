"""Odd files and values, and ways to put them in any place of a good one."""

import copy
import math
from typing import Any

__all__ = ["ODD_VALUES", "UNREADABLE", "WRONG", "changed", "places"]

UNREADABLE = {
    "empty": b"",
    "blank": b" \n",
    "no UTF-8": b"\xff\xfe\x00\x01",
    "Latin-1": b'["\xe9"]',
    "zero bytes": b"\0" * 100,
    "no JSON": b"name: 0.0",
    "half": b'[{"name": ',
    "digits": b"1" * 5000,
    **{f"lists {depth}": b"[" * depth + b"]" * depth for depth in (40, 950, 200_000)},
    **{f"open lists {depth}": b"[" * depth for depth in (1000, 200_000)},
    **{f"objects {depth}": b'[{"a":' * depth + b"1" + b"}]" * depth for depth in (250, 5000)},
}
WRONG = {
    "number": b"5",
    "text": b'"x"',
    "null": b"null",
    "NaN": b"NaN",
    "object": b"{}",
    "a rank alone": b'{"name": "0.0", "agent_metadata": "AA==", "fence": [1, 0, 1]}',
    "numbers": b"[1]",
    "lists": b"[[[]]]",
    "nulls": b"[null]",
    "surrogate": b'[{"name": "\\ud800", "agent_metadata": "AA==", "fence": [1, 0, 1]}]',
    "escapes": b'[{"name": "\\u001b[2J", "agent_metadata": "AA==", "fence": [1, 0, 1]}]',
    "infinite fence": b'[{"name": "0.0", "agent_metadata": "AA==", "fence": [1e999, 0, NaN]}]',
    "huge fence": b'[{"name": "0.0", "agent_metadata": "AA==", "fence": [' + b"9" * 4000 + b", 0, 1]}]",
}
ODD_VALUES = [
    *(None, True, 0, -1, 5, 2**64, 10**400, 1.5, math.nan, math.inf, "", "x", "\ud800", "\x1b[2J", "\u0663"),
    *([], [1], [[]], {}, {"a": 1}),
]


def places(value, at=()):
    below: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in below:
        yield (*at, key)
        yield from places(child, (*at, key))


def changed(value, place, odd):
    made = copy.deepcopy(value)
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = odd
    return made
