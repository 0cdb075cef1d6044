"""A ticket stays usable whatever program a router reads and writes its JSON with, also one that keeps numbers as doubles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from oracle.geometry import draw
from oracle.runner import run


def as_doubles(text: str) -> str:
    """Read and write JSON as a program does that has only 64-bit floats: jq 1.6, JavaScript, Go's `map[string]any`."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(json.loads(text, parse_int=float)))


def test_doubles_change_what_they_cannot_hold() -> None:
    """The reader of these tests is as bad as the ones it stands for."""
    assert (
        as_doubles('{"n": [9007199254740993, 2.5, true, "9007199254740993"]}')
        == '{"n": [9007199254740992, 2.5, true, "9007199254740993"]}'
    )


def test_a_float64_reader_leaves_a_ticket_usable() -> None:
    for seed in (3, 5, 11, 21, 34):
        assert run(draw(seed), router=as_doubles).codes == run(draw(seed)).codes, f"seed {seed}"


def test_no_number_in_a_ticket_needs_more_than_a_double() -> None:
    seen: list[dict[str, Any]] = []

    def look(text: str) -> str:
        seen.append(json.loads(text))
        return text

    for seed in range(40):
        run(draw(seed), router=look)
    assert seen
    numbers = [n for ticket in seen for n in _numbers(ticket)]
    assert max(numbers) < 2**53
    assert all(
        as_doubles(json.dumps(ticket)) == json.dumps(json.loads(as_doubles(json.dumps(ticket)))) for ticket in seen
    )
    for ticket in seen:
        assert json.loads(as_doubles(json.dumps(ticket))) == ticket


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield value
