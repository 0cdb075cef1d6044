"""Early tickets: read strictly, and only where a secret or a list of peers covers their address."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from kv_scheduler_state import TicketError, prefill_request_params
from kv_scheduler_state.hosts import HostPolicy
from kv_scheduler_state.ticket.early import EARLY_KEY, EarlyTicket, canonical_early, early_params, named_id, read_early
from kv_scheduler_state.ticket.seal import TicketSeal

SECRET, OTHER = b"a fleet secret, 16+", b"the secret of another fleet"
EARLY = EarlyTicket("000102030405060708090a0b0c0d0e0f", "10.0.0.1", 5600)
PEERS = HostPolicy(("10.0.0.0/8",), ports=(1024, 65535))
OPEN = HostPolicy()
PAGE = Path(__file__).parents[3] / "docs" / "wire" / "ticket.md"


def read(value: Any, hosts: HostPolicy = PEERS, seal: TicketSeal | None = None) -> EarlyTicket:
    return read_early({"do_remote_prefill": True, "kv_stream": value}, hosts, seal)


def refusal(value: Any, hosts: HostPolicy = PEERS, seal: TicketSeal | None = None) -> str:
    with pytest.raises(TicketError) as caught:
        read(value, hosts, seal)
    return caught.value.code


def changed(**changes: Any) -> dict[str, Any]:
    return {**early_params(EARLY), **changes}


def test_a_router_s_params_are_read_back() -> None:
    params = prefill_request_params(EARLY)
    assert params["do_remote_decode"] is True
    assert read(params["kv_stream"]) == EARLY
    assert "kv_stream" not in prefill_request_params()


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "ticket-type"),
        ([], "ticket-type"),
        ({}, "ticket-missing"),
        ({"id": EARLY.hand_over_id, "host": "10.0.0.1"}, "ticket-missing"),
        (changed(more=1), "ticket-type"),
        (changed(id="A" * 32), "ticket-text"),
        (changed(id="a" * 31), "ticket-text"),
        (changed(id="a" * 32 + "\n"), "ticket-text"),
        (changed(id=7), "ticket-text"),
        (changed(host=""), "ticket-text"),
        (changed(host="h" * 254), "ticket-text"),
        (changed(host=["10.0.0.1"]), "ticket-text"),
        (changed(port=True), "ticket-type"),
        (changed(port=5600.0), "ticket-type"),
        (changed(port=0), "ticket-range"),
        (changed(port=65536), "ticket-range"),
        (changed(port=80), "ticket-host"),
        (changed(host="11.0.0.1"), "ticket-host"),
        (changed(host="p1"), "ticket-host"),
        (changed(host="169.254.169.254"), "ticket-host"),
    ],
)
def test_anything_else_is_refused_by_code(value: Any, code: str) -> None:
    assert refusal(value) == code


@pytest.mark.parametrize("seal", [None, TicketSeal((SECRET,))])
def test_the_keys_of_an_early_ticket_are_counted_before_they_are_looked_at(seal: TicketSeal | None) -> None:
    """14 MB of unknown keys took 3.7 s of the scheduler's thread, and on a prefill engine twice that."""
    many = {**early_params(EARLY, SECRET), **{f"{number:07}": number for number in range(1_000_000)}}
    began_s = time.thread_time()
    assert refusal(many, PEERS, seal) == "ticket-type"
    assert named_id({EARLY_KEY: many}, seal) == ("" if seal else EARLY.hand_over_id)
    assert time.thread_time() - began_s < 1.0
    with pytest.raises(TicketError, match="has 1000004 keys, at most 16"):
        read_early({EARLY_KEY: many}, PEERS, seal)


def test_without_secrets_and_without_peers_nothing_covers_the_address() -> None:
    assert refusal(early_params(EARLY), OPEN) == "ticket-early-uncovered"
    assert refusal(early_params(EARLY, SECRET), OPEN) == "ticket-early-uncovered"


@pytest.mark.parametrize("hosts", [OPEN, PEERS])
def test_with_secrets_only_their_mac_covers_the_address(hosts: HostPolicy) -> None:
    seal = TicketSeal((OTHER, SECRET))
    good = early_params(EARLY, SECRET)
    assert read(good, hosts, seal) == EARLY
    for wrong in (
        early_params(EARLY),
        early_params(EARLY, b"an unknown secret, 16+"),
        {**good, "host": "10.0.0.2"},
        {**good, "port": 5601},
        {**good, "id": "f" * 32},
        {**good, "mac": str(good["mac"]).upper()},
        {**good, "mac": b"\xff" * 32},
        {**good, "mac": "é" * 64},
        {**good, "mac": ""},
    ):
        assert refusal(wrong, hosts, seal) == "ticket-seal"


def test_a_mac_does_not_widen_the_list_of_peers() -> None:
    away = EARLY._replace(host="11.0.0.1")
    assert refusal(early_params(away, SECRET), PEERS, TicketSeal((SECRET,))) == "ticket-host"


def test_the_bytes_under_the_mac_are_those_of_the_example() -> None:
    assert len(canonical_early(EARLY)) == 75
    # Moved borders between two texts change the bytes.
    assert canonical_early(EarlyTicket("a" * 32, "bc", 1)) != canonical_early(EarlyTicket("a" * 31, "abc", 1))


@pytest.mark.skipif(not PAGE.is_file(), reason="the package is tested outside its repository")
def test_the_page_works_out_a_mac() -> None:
    (mac,) = re.findall(
        r"^`([0-9a-f]{64})`\.$", PAGE.read_text().split("## Early ticket")[1].split("\n## ")[0], re.MULTILINE
    )
    assert early_params(EARLY, SECRET)["mac"] == mac
