"""A ticket stays usable whatever program a router reads and writes its JSON with, also one that keeps numbers as doubles."""

from __future__ import annotations

import json
from typing import Any

from oracle.geometry import draw
from oracle.runner import Play, run

SIX_KEYS: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""How llm-d's sidecar (llm-d-router 0.9, pkg/sidecar/proxy/connector_nixlv2.go) and Dynamo 1.6 ask for a ticket."""


def as_doubles(text: str) -> str:
    """Read and write JSON as a program does that has only 64-bit floats: jq 1.6, JavaScript, Go's `map[string]any`."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(json.loads(text, parse_int=float)))


def test_a_ticket_that_a_router_asked_for_is_read_after_a_reader_of_doubles() -> None:
    for seed in (3, 5, 11, 21, 34):
        play = Play(draw(seed), router=as_doubles)
        play.ask = dict(SIX_KEYS)
        assert play.run().codes == run(draw(seed)).codes, f"seed {seed}"


def test_no_number_in_a_ticket_needs_more_than_a_double() -> None:
    seen: list[str] = []

    def look(text: str) -> str:
        seen.append(text)
        return text

    for seed in range(40):
        run(draw(seed), router=look)
    assert seen
    for text in seen:
        json.loads(text, parse_int=lambda digits: _at_most(int(digits)))
        assert json.loads(as_doubles(text)) == json.loads(text)


def _at_most(number: int) -> int:
    assert abs(number) < 2**53
    return number
