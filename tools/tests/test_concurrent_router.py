"""The router that sends each request to both engines at once, between stand-in engines."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from stand_ins import (
    Handler,
    StandIn,
    dies_at_once,
    drains,
    fails,
    gives_text,
    gives_ticket,
    refuses,
    streams,
)

from kvdev.arguments import make_parser
from kvdev.early import EarlyTickets, early_tickets, parse_side_channel
from kvdev.router import make_app
from kvdev.steps import DevError

SECRET = b"a fleet secret, 16+"


def ask(
    prefill: Handler | None, decode: list[Handler], body: dict[str, Any], secret: bytes | None = None
) -> tuple[int, str, StandIn, list[StandIn], dict[str, Any]]:
    """Send one body; return (status, text, prefill stand-in, decode stand-ins, router health)."""

    async def run() -> Any:
        engines = [StandIn(prefill or gives_text), *map(StandIn, decode)]
        for engine in engines:
            await engine.server.start_server()
        urls = [engine.url for engine in engines]
        if prefill is None:
            await engines[0].server.close()
        early = EarlyTickets(urls[:1], [("127.0.0.1", 5600)], secret)
        async with TestClient(TestServer(make_app(urls[:1], urls[1:], early))) as client:
            reply = await client.post("/v1/completions", json=body)
            text = await reply.text()
            health = await (await client.get("/health")).json()
        for engine in engines if prefill is not None else engines[1:]:
            await engine.server.close()
        return reply.status, text, engines[0], engines[1:], health

    answer: tuple[int, str, StandIn, list[StandIn], dict[str, Any]] = asyncio.run(asyncio.wait_for(run(), 30))
    return answer


def test_both_engines_get_the_request_with_one_hand_over_id() -> None:
    body = {"prompt": "p", "max_tokens": 9, "min_tokens": 3}
    status, text, prefill, (decode,), health = ask(gives_ticket, [gives_text], body)
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, "hello")
    asked, told = (engine.asked[0]["kv_transfer_params"] for engine in (prefill, decode))
    assert asked["kv_stream"] == told["kv_stream"]
    assert set(asked["kv_stream"]) == {"id", "host", "port"}
    assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
    assert (told["do_remote_decode"], told["do_remote_prefill"]) == (False, True)
    assert "remote_block_ids" not in told
    assert (prefill.asked[0]["max_tokens"], "min_tokens" in prefill.asked[0]) == (1, False)
    assert {**decode.asked[0], "kv_transfer_params": None} == {**body, "kv_transfer_params": None}
    assert (health["concurrent"], health["prefill_errors"]) == (1, 0)


def test_engines_work_at_the_same_time() -> None:
    arrived: dict[str, float] = {}

    async def waits(request: web.Request) -> web.StreamResponse:
        arrived["prefill"] = time.monotonic()
        while "decode" not in arrived:
            await asyncio.sleep(0.001)
        return await gives_ticket(request)

    async def comes_before_the_ticket(request: web.Request) -> web.StreamResponse:
        while "prefill" not in arrived:
            await asyncio.sleep(0.001)
        arrived["decode"] = time.monotonic()
        return await gives_text(request)

    assert ask(waits, [comes_before_the_ticket], {"prompt": "p"})[0] == 200


def test_ids_are_new_with_each_request() -> None:
    tickets = EarlyTickets(["http://a/"], [("h", 1)])
    assert len({tickets.new("http://a")["id"] for _ in range(50)}) == 50


@pytest.mark.parametrize("gone", [None, fails, drains, dies_at_once])
def test_a_prefill_engine_that_fails_costs_no_answer(gone: Handler | None) -> None:
    status, text, _, (decode,), health = ask(gone, [gives_text], {"prompt": "p"})
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, "hello")
    assert len(decode.asked) == 1
    assert health["decode_errors"] == 0


@pytest.mark.parametrize("gone", [refuses, fails])
def test_a_hand_over_whose_prompt_will_not_come_is_withdrawn(gone: Handler) -> None:
    """A decode engine waits for the prompt, up to 30 s, until the prefill engine says that it will not come."""
    withdrawn = asyncio.Event()

    async def fails_and_notes(request: web.Request) -> web.StreamResponse:
        if not (await request.json())["kv_transfer_params"]["kv_stream"].get("withdraw"):
            return await gone(request)
        withdrawn.set()
        return await gives_text(request)

    async def waits_for_the_prompt(request: web.Request) -> web.StreamResponse:
        await withdrawn.wait()
        return await gives_text(request)

    status, _, prefill, (decode,), _ = ask(fails_and_notes, [waits_for_the_prompt], {"model": "m", "prompt": "p"})
    assert status == 200
    first, second = prefill.asked
    stream = decode.asked[0]["kv_transfer_params"]["kv_stream"]
    assert second["kv_transfer_params"] == {**first["kv_transfer_params"], "kv_stream": {**stream, "withdraw": True}}
    assert (second["model"], second["prompt"], second["max_tokens"]) == ("m", [0], 1)
    assert prefill.headers[0] != prefill.headers[1], "engines tell requests apart by this id"


def test_a_request_that_is_wrong_is_refused_by_the_engine_that_answers() -> None:
    status, text, _, _, health = ask(refuses, [refuses], {"prompt": "p"})
    assert (status, json.loads(text)) == (400, {"error": "too long"})
    assert health["prefill_errors"] == 0


def test_a_stream_is_relayed_and_a_slow_prefill_is_let_go_when_it_ends() -> None:
    left = asyncio.Event()

    async def never_ends(request: web.Request) -> web.StreamResponse:
        try:
            while request.transport is not None:
                await asyncio.sleep(0.005)
        finally:
            left.set()
        return web.Response()

    async def run() -> str:
        engines = [StandIn(never_ends), StandIn(streams)]
        for engine in engines:
            await engine.server.start_server()
        early = EarlyTickets([engines[0].url], [("127.0.0.1", 5600)])
        async with TestClient(TestServer(make_app([engines[0].url], [engines[1].url], early))) as client:
            reply = await client.post("/v1/completions", json={"prompt": "p", "stream": True})
            text = await reply.text()
            await asyncio.wait_for(left.wait(), 10)
        for engine in engines:
            await engine.server.close()
        return text

    assert asyncio.run(run()) == "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


def test_a_decode_engine_that_drains_passes_the_early_ticket_on() -> None:
    status, _, prefill, decode, _ = ask(gives_ticket, [drains, gives_text], {"prompt": "p"})
    assert status == 200
    first, second = (engine.asked[0]["kv_transfer_params"] for engine in decode)
    assert first["kv_stream"] == second["kv_stream"]
    assert len(prefill.asked) == 1


def test_a_decode_engine_that_died_with_the_early_ticket_is_followed_by_a_plain_hand_over() -> None:
    status, _, prefill, decode, _ = ask(gives_ticket, [dies_at_once, gives_text], {"prompt": "p"})
    assert status == 200
    assert "kv_stream" not in decode[1].asked[0]["kv_transfer_params"]
    assert len(prefill.asked) == 2


def test_several_prompts_are_no_hand_over() -> None:
    status, _, prefill, (decode,), health = ask(gives_ticket, [gives_text], {"prompt": ["p", "q"]})
    assert (status, prefill.asked, health["concurrent"]) == (200, [], 0)
    assert "kv_transfer_params" not in decode.asked[0]


def test_engines_of_the_fleet_take_the_routers_mac() -> None:
    from kv_scheduler_state.hosts import HostPolicy
    from kv_scheduler_state.ticket.early import read_early
    from kv_scheduler_state.ticket.seal import TicketSeal

    _, _, _, (decode,), _ = ask(gives_ticket, [gives_text], {"prompt": "p"}, SECRET)
    read = read_early(decode.asked[0]["kv_transfer_params"], HostPolicy(), TicketSeal((SECRET,)))
    assert (read.host, read.port) == ("127.0.0.1", 5600)


def test_options_make_early_tickets(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET + b"\nan older one of the fleet\n")
    words = ["--prefill", "http://a", "--decode", "http://b", "--concurrent", "[::1]:5600", "--secret-file"]
    chosen = make_parser().parse_args(["router", *words, str(tmp_path / "secret")])
    early = early_tickets(chosen.prefill, chosen.concurrent, chosen.secret_file)
    assert early is not None
    made = early.new("http://a")
    assert (made["host"], made["port"], len(str(made["mac"]))) == ("::1", 5600, 64)
    assert early_tickets(["http://a"], [], "") is None


@pytest.mark.parametrize("channels", [["5600"], ["h:0"], ["h:x"], [":1"], ["a:1", "b:2"]])
def test_side_channels_that_are_none_are_refused_at_the_start(channels: list[str]) -> None:
    with pytest.raises(DevError, match="--concurrent"):
        early_tickets(["http://a"], channels, "")


def test_a_secret_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DevError, match="No such file"):
        early_tickets(["http://a"], ["h:1"], str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    with pytest.raises(DevError, match="--concurrent"):
        early_tickets(["http://a"], ["h:1"], str(tmp_path / "empty"))


def test_side_channels_are_hosts_and_ports() -> None:
    assert [parse_side_channel(each) for each in ("h:1", "[::1]:65535")] == [("h", 1), ("::1", 65535)]
