"""The ticket's seal and the checksum of agent metadata, written and verified in Go and in Python."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gopher import Gopher

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.memory.peers import add_checksum, open_metadata
from kv_scheduler_state import UNBOUND, SchedulerConfig, SchedulerState, prompt_digest

ROOT = Path(__file__).resolve().parents[2]
SEALS: dict[str, dict[str, Any]] = json.loads((ROOT / "packages/kv-scheduler-state/tests/data/seals.json").read_text())
SECRET = "a fleet secret, 16+"
TICKET: dict[str, Any] = SEALS["one group"]["ticket"]


@pytest.mark.parametrize("name", SEALS)
def test_golden_seals(gopher: Gopher, name: str) -> None:
    case = SEALS[name]
    assert gopher.ok("sealed-bytes", ticket=case["ticket"]) == case["bytes"]
    assert gopher.ok("seal", ticket=case["ticket"], secrets=[case["secret"]]) == case["ticket"]["kv_seal"]
    assert gopher.ok("verify", ticket=case["ticket"], secrets=["an older secret of 16", case["secret"]]) is True


def admitted(ticket: dict[str, Any]) -> str:
    """Return the code with which a Python consumer refuses a ticket, "" where it reads by it."""
    config = SchedulerConfig("d0", "10.0.0.2", 5600, null_block=0, fence_seed=1, nonce_seed="n")
    state = SchedulerState(config, secrets=[SECRET.encode()])
    return state.arrive("d1", ticket, prompt_tokens=48, identity=UNBOUND, now_s=0.0).rejected_code


def changed(ticket: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return the ticket with one value that a consumer acts on changed."""
    made = copy.deepcopy(ticket)
    key = draw.choice(
        [key for key, value in made.items() if value is not None and not key.startswith(("do_", "transfer"))]
    )
    value = made[key]
    if key == "remote_registration_generation":  # `kv_generation` counts
        key, value = "kv_generation", made["kv_generation"]
    if isinstance(value, str):
        at = len(value) - 1 if key == "remote_host" else draw.randrange(len(value))  # a host stays an address
        made[key] = value[:at] + ("1" if value[at] == "0" else "0") + value[at + 1 :]
    elif isinstance(value, list):
        inner = value[0] if isinstance(value[0], list) else value
        inner[draw.randrange(len(inner))] += draw.choice([1, 16])
    else:
        made[key] = value + 1
    return made


def test_python_admits_what_go_sealed_and_both_refuse_300_changes(gopher: Gopher) -> None:
    ticket = {key: value for key, value in TICKET.items() if key not in {"kv_prompt", "kv_seal"}}
    ticket["kv_seal"] = gopher.ok("seal", ticket=ticket, secrets=[SECRET])
    assert admitted(ticket) == ""
    draw = random.Random(3)
    for _ in range(300):
        forged = changed(ticket, draw)
        assert gopher.code("verify", ticket=forged, secrets=[SECRET]) == "ticket-seal", forged
        assert admitted(forged) == "ticket-seal", forged


@pytest.mark.parametrize(
    "route",
    [
        lambda ticket: dict(reversed(ticket.items())),
        lambda ticket: {**ticket, "router_hint": {"a": [1]}},
        lambda ticket: {key: value for key, value in ticket.items() if value is not None},
        lambda ticket: {key: float(value) if type(value) is int else value for key, value in ticket.items()},
    ],
    ids=["another order", "more keys", "no nulls", "doubles"],
)
def test_routers_do_not_break_a_seal(gopher: Gopher, route: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    for case in SEALS.values():
        assert gopher.ok("verify", ticket=route(case["ticket"]), secrets=[case["secret"]]) is True


def test_a_foreign_missing_or_cut_seal_is_refused(gopher: Gopher) -> None:
    secret = SEALS["one group"]["secret"]
    assert gopher.code("verify", ticket=TICKET, secrets=["the secret of another fleet"]) == "ticket-seal"
    for seal in (None, "", TICKET["kv_seal"][:63], TICKET["kv_seal"].upper(), 5):
        assert gopher.code("verify", ticket={**TICKET, "kv_seal": seal}, secrets=[secret]) == "ticket-seal"


PROMPTS: list[tuple[list[int], dict[str, Any]]] = [
    ([], {}),
    ([1, 2, 3], {}),
    ([151643, -1, 2**40], {"lora": "sql", "media": [("ab12", 0, 4), ("ä", 7, 1)], "salt": "t", "embeds": "ff"}),
]


@pytest.mark.parametrize(("tokens", "rest"), PROMPTS)
def test_prompts_have_one_digest(gopher: Gopher, tokens: list[int], rest: dict[str, Any]) -> None:
    media = [{"Hash": content, "First": first, "Count": count} for content, first, count in rest.get("media", ())]
    prompt = {"Tokens": tokens, **{key.title(): value for key, value in rest.items()}, "Media": media}
    assert gopher.ok("digest", prompt=prompt) == prompt_digest(tokens, **rest)


BLOB = b"nixlSerDes|Agent" + bytes(range(200)) + b"|"


def is_sound(received: bytes) -> bool:
    """Return whether our own reader takes agent metadata."""
    try:
        open_metadata(received)
    except AgentError:
        return False
    return True


def test_agent_metadata_gets_one_checksum_and_every_flip_is_seen_alike(gopher: Gopher) -> None:
    whole = add_checksum(BLOB)
    assert bytes.fromhex(gopher.ok("checksum-agent", hex=BLOB.hex())) == whole
    assert gopher.ok("check-agent", hex=whole.hex()) is True
    assert gopher.ok("check-agent", hex=BLOB.hex()) is True, "vLLM writes no checksum"
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        assert gopher.ok("check-agent", hex=flipped.hex()) is is_sound(bytes(flipped)) is False, bit
    for cut in range(1, 8):
        ends_alike = next(
            whole
            for whole in (add_checksum(b"nixlSerDes|" + bytes([n >> 8, n & 255]) + b"|") for n in range(65_536))
            if whole[-cut - 1] == ord("|")
        )
        assert gopher.ok("check-agent", hex=ends_alike[:-cut].hex()) is is_sound(ends_alike[:-cut]) is False, cut
