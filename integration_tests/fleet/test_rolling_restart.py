"""Engines are replaced one by one under load: no request fails, all texts are right, tickets that are out are read."""

from __future__ import annotations

import time
import urllib.error
from typing import Any

import pytest
from judging import (
    EXPIRED,
    FAILED,
    PROMPTS,
    REQUESTS,
    Alone,
    Load,
    Reply,
    assert_no_lease_left,
    failures,
    handed_over,
    prompt,
    request_body,
)
from two_by_two import SHUTDOWN_TIMEOUT_S, TwoByTwo

from kvdev.demo import running_router
from kvdev.router import ANOTHER_TICKET

PLACES = (0, 1, 2, 3)
"""Engines that are replaced, one after the other."""
ASK_TICKET = {"do_remote_decode": True, "do_remote_prefill": False}
AT_ONCE = 3


def hold_ticket(fleet: TwoByTwo, place: int, number: int) -> dict[str, Any]:
    """Let a prefill engine compute a prompt and keep the ticket back, as a slow router does."""
    asked = {**request_body(prompt(number)), "max_tokens": 1, "kv_transfer_params": ASK_TICKET}
    ticket = fleet.engines[place].complete(asked)["kv_transfer_params"]
    assert isinstance(ticket, dict), f"{fleet.engines[place].spec.name} gave no ticket"
    return ticket


def wait_until_refused(fleet: TwoByTwo, place: int) -> None:
    """Wait until an engine that was asked to end refuses: an HTTP 500, or HTTP 200 with an abort."""
    until = time.monotonic() + 60
    while True:
        try:
            answer: Any = fleet.engines[place].complete({**request_body("refused?"), "max_tokens": 1})
        except urllib.error.HTTPError as error:
            if error.code == 500:
                return
            raise
        if answer["choices"][0]["finish_reason"] == "abort":
            return
        assert time.monotonic() < until, "the engine goes on taking requests"


def replace(fleet: TwoByTwo, place: int, alone: Alone) -> None:
    """Tell an engine to end and start it anew; a prefill engine has a ticket out meanwhile, which is read at last."""
    engine = fleet.engines[place]
    is_prefill = engine in fleet.prefill
    number = PROMPTS - 1 - place
    ticket = hold_ticket(fleet, place, number) if is_prefill else None
    asked_s = time.monotonic()
    engine.ask_to_end()
    if ticket is not None:
        wait_until_refused(fleet, place)
        assert engine.is_running, "it ended although a ticket was out"
        reader = fleet.decode[1]
        before = handed_over([reader.metrics()])
        answer: Any = reader.complete({**request_body(prompt(number)), "kv_transfer_params": ticket})
        alone.assert_same([Reply(number, 200, answer["choices"][0]["text"])])
        assert handed_over([reader.metrics()]) > before, "the prompt was computed again"
    assert engine.has_ended(within_s=SHUTDOWN_TIMEOUT_S + 10), f"it does not end:\n{engine.last_words()}"
    ended_s = time.monotonic()
    assert ended_s - asked_s < SHUTDOWN_TIMEOUT_S, "the drain ended by its timeout, not by the last request and lease"
    log = engine.log.read_text(errors="replace")
    assert not is_prefill or "it gives no more tickets" in log, log[-3000:]
    assert "unread tickets are lost (" not in log
    fleet.start_again(place)
    print(f"{engine.spec.name}: drained in {ended_s - asked_s:.1f} s, back after {time.monotonic() - ended_s:.1f} s")


def test_engines_are_replaced_under_load_and_no_request_fails(
    alone: Alone, two_by_two: TwoByTwo, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet = two_by_two
    prefill, decode = ([engine.url for engine in side] for side in (fleet.prefill, fleet.decode))
    with running_router(prefill, decode) as router:
        # Engines end with the thread that started them, so that is this one, and the load has a thread of its own.
        started_s, load = time.monotonic(), Load(router, range(REQUESTS), at_once=AT_ONCE, is_needed=True)
        try:
            for place in PLACES:
                replace(fleet, place, alone)
        finally:
            replies = load.ended()
        print(f"{len(replies)} requests in {time.monotonic() - started_s:.0f} s")
        alone.assert_same(replies)
        # Counters of engines that were replaced began anew; those that were not must have read.
        assert handed_over([engine.metrics() for engine in fleet.decode]) >= 1
        counts = failures(fleet.pages())
        assert counts[FAILED] == 0, counts
        # The router cannot tell whether an engine that closed its connection has used a ticket, so it asks prefill for another;
        # the lease of the first one ends by itself then.
        said = capfd.readouterr()
        print(said.out, said.err, sep="\n")  # for the report of a failure
        assert counts[EXPIRED] <= said.err.count(ANOTHER_TICKET), counts
        assert_no_lease_left(fleet.pages, fleet.take_steps, within_s=60)
