"""The router between stand-in engines, one after the other and both at once."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web
from stand_ins import (
    TICKET,
    Fleet,
    Handler,
    dies_at_once,
    drains,
    fails,
    gives_text,
    gives_ticket,
    refuses,
    send,
    streams,
)

from kvdev.arguments import make_parser
from kvdev.backends import Side
from kvdev.early import EarlyTickets, early_tickets, parse_side_channel
from kvdev.router import make_app, serve_forever
from kvdev.steps import DevError

STREAMED = "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
SECRET = b"a fleet secret, 16+"


def concurrent(prefill: Handler | None, *decode: Handler, secret: bytes | None = None) -> Fleet:
    return Fleet([prefill], decode, [("127.0.0.1", 5600)], secret)


def text_of(answer: str) -> str:
    return str(json.loads(answer)["choices"][0]["text"])


# ---------------------------------------------------------------------------------------------- one after the other


def test_the_ticket_goes_from_prefill_to_decode_and_the_body_stays() -> None:
    body = {"prompt": "p", "max_tokens": 9, "stream_options": {}, "min_tokens": 3, "n": 4, "best_of": 4}
    fleet = Fleet([gives_ticket], [gives_text])
    ((status, text, health),) = send(fleet, {**body, "kv_transfer_params": {"evil": 1}})
    assert (status, text_of(text), health["tickets"]) == (200, "hello", 1)
    (asked,) = fleet.prefill[0].asked
    assert (asked["max_tokens"], asked["stream"], asked["n"]) == (1, False, 1)
    assert asked["kv_transfer_params"]["do_remote_decode"]
    assert not asked.keys() & {"stream_options", "min_tokens", "best_of"}
    assert "evil" not in asked["kv_transfer_params"]
    assert fleet.decode[0].asked == [{**body, "kv_transfer_params": TICKET}]
    assert fleet.prefill[0].headers == fleet.decode[0].headers != [""]


def test_a_stream_is_relayed_as_it_comes() -> None:
    answers = send(Fleet([gives_ticket], [streams]), {"prompt": "p", "stream": True}, "/v1/chat/completions")
    assert [answer[:2] for answer in answers] == [(200, STREAMED)]


@pytest.mark.parametrize(("prefill", "counter"), [(None, "prefill_errors"), (gives_text, "no_ticket")])
def test_without_a_ticket_the_decode_engine_computes_the_prompt(prefill: Handler | None, counter: str) -> None:
    fleet = Fleet([prefill], [gives_text])
    ((status, _, health),) = send(fleet, {"prompt": "p"})
    assert (status, fleet.tickets, health[counter]) == (200, [None], 1)


@pytest.mark.parametrize("prompt", [["p", "q"], [[1, 2], [3]], [1, 2], ["p"], [[1, 2]]])
def test_a_body_with_several_prompts_is_not_handed_over(prompt: list[Any]) -> None:
    is_one = prompt in ([1, 2], ["p"], [[1, 2]])
    for fleet in (Fleet([gives_ticket], [gives_text]), concurrent(gives_ticket, gives_text)):
        ((status, _, _),) = send(fleet, {"prompt": prompt})
        assert (status, len(fleet.prefill[0].asked), fleet.tickets == [None]) == (200, is_one, not is_one)


def test_a_wrong_request_is_refused_by_the_engine_that_finds_it() -> None:
    fleet = Fleet([refuses], [gives_text])
    ((status, text, _),) = send(fleet, {"prompt": "p"})
    assert (status, json.loads(text), fleet.tickets) == (400, {"error": "too long"}, [])
    for body in ("{", "[1]", '"x"'):
        assert send(Fleet([gives_ticket], [gives_text]), body)[0].status == 400


@pytest.mark.parametrize("decode", [None, drains])
def test_a_request_that_all_decode_engines_refuse_is_a_502_that_says_why(decode: Handler | None) -> None:
    ((status, text, _),) = send(Fleet([gives_ticket], [decode, decode]), {"prompt": "p"})
    assert (status, "did not answer: http" in text, "it drains" in text) == (502, True, decode is drains)


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:8000", "http://", "http://host:port", "ftp://host"])
def test_an_invalid_address_is_refused_at_the_start(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_forever(["http://127.0.0.1:1"], [url], host="127.0.0.1", port=0) == 1
    assert url in capsys.readouterr().out
    assert serve_forever(["http://127.0.0.1:1"], ["http://127.0.0.1:1"], host="127.0.0.1", port=99999) == 1
    assert "99999" in capsys.readouterr().out


def test_the_router_says_that_it_is_a_demo_and_names_those_for_service(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["router", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("demo", "not for service", "vllm-router", "llm-d", "Ray Serve LLM", "Dynamo"):
        assert words in shown


# -------------------------------------------------------------------------------------------- engines that fail


async def is_ending(_: web.Request) -> web.StreamResponse:
    """Answer as vLLM's server does once it has shut its tokenizer's threads down, which is right after SIGTERM."""
    error = {"message": "cannot schedule new futures after shutdown", "type": "InternalServerError", "code": 500}
    return web.json_response({"error": error}, status=500)


async def said_in_a_stream(request: web.Request, *events: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def drains_in_a_stream(request: web.Request) -> web.StreamResponse:
    return await said_in_a_stream(
        request,
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": ""}, "finish_reason": "abort"}]},
    )


async def fails_in_a_stream(request: web.Request) -> web.StreamResponse:
    return await said_in_a_stream(request, {"error": {"message": "Internal server error", "code": 500}})


async def dies_in_the_middle(request: web.Request) -> web.StreamResponse:
    response = await streams(request)
    assert request.transport is not None
    request.transport.abort()
    return response


@pytest.mark.parametrize("gone", [None, drains, is_ending, fails, dies_at_once])
def test_a_prefill_engine_that_refuses_is_replaced_by_the_other(gone: Handler | None) -> None:
    fleet = Fleet([gone, gives_ticket], [gives_text, gives_text])
    assert {answer.status for answer in send(fleet, {"prompt": "p"}, times=4)} == {200}
    assert fleet.tickets == [TICKET] * 4


@pytest.mark.parametrize(("gone", "prefills"), [(None, 1), (drains, 1), (is_ending, 1), (dies_at_once, 2)])
def test_a_decode_engine_that_refuses_is_replaced_by_the_other(gone: Handler | None, prefills: int) -> None:
    """A ticket that the engine cannot have used goes to the next one; else the prompt is handed over anew."""
    fleet = Fleet([gives_ticket, gives_ticket], [gone, gives_text])
    ((status, text, _),) = send(fleet, {"prompt": "p"})
    assert (status, text_of(text)) == (200, "hello")
    assert sum(len(engine.asked) for engine in fleet.prefill) == prefills
    assert all(ticket == TICKET for ticket in fleet.tickets)


def test_a_ticket_that_two_engines_refuse_is_replaced() -> None:
    refusals = iter([fails, fails])

    async def refuses_twice(request: web.Request) -> web.StreamResponse:
        return await next(refusals, gives_text)(request)

    fleet = Fleet([gives_ticket, gives_ticket], [refuses_twice, refuses_twice])
    assert send(fleet, {"prompt": "p"})[0].status == 200
    assert sum(len(engine.asked) for engine in fleet.prefill) == 2
    assert fleet.tickets == [TICKET] * 3


@pytest.mark.parametrize("gone", [drains_in_a_stream, fails_in_a_stream, dies_at_once])
def test_a_stream_of_which_the_client_saw_nothing_begins_again_elsewhere(gone: Handler) -> None:
    fleet = Fleet([gives_ticket, gives_ticket], [gone, streams])
    answers = send(fleet, {"prompt": "p", "stream": True}, times=4)
    assert [answer[:2] for answer in answers] == [(200, STREAMED)] * 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_breaks_ends_the_connection_and_a_stream_with_an_error_event(is_stream: bool) -> None:
    seen: list[bytes] = []

    async def run() -> None:
        async with Fleet([gives_ticket], [dies_in_the_middle]) as client:
            reply = await client.post("/v1/completions", json={"prompt": "p", "stream": is_stream})
            async for line in reply.content:
                seen.append(line.strip())  # noqa: PERF401  (those before the end of the connection are kept)

    with pytest.raises(ClientError):
        asyncio.run(asyncio.wait_for(run(), timeout=10))
    error = json.loads([line for line in seen if line][-1].removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == (502, "router_error")


def test_a_client_that_leaves_is_not_the_engines_fault() -> None:
    """No other engine gets its request, and the engine that still answers sees its connection end."""
    left = asyncio.Event()

    async def talks_for_long(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number in range(1000):
                event = {"choices": [{"text": str(number)}]}
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
                await asyncio.sleep(0.005)
        finally:
            left.set()
        return response

    async def run() -> tuple[int, int, int]:
        fleet = Fleet([gives_ticket], [talks_for_long])
        async with fleet:
            # As `serve_forever` runs it: aiohttp's test server would cancel the router's handler instead.
            runner = web.AppRunner(make_app(*fleet.urls))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with ClientSession() as session:
                reply = await session.post(f"{url}/v1/completions", json={"prompt": "p", "stream": True})
                assert json.loads((await reply.content.readline()).removeprefix(b"data: "))
                reply.close()
                await asyncio.wait_for(left.wait(), timeout=4)
                await asyncio.sleep(0.3)
                health = await (await session.get(f"{url}/health")).json()
            await runner.cleanup()
            return len(fleet.prefill[0].asked), len(fleet.tickets), health["decode_errors"]

    assert asyncio.run(run()) == (1, 1, 0)


def test_models_come_from_the_engine_that_is_left_and_health_names_the_other() -> None:
    async def run() -> None:
        gone = ["http://127.0.0.1:1"] * 2
        async with Fleet([gives_ticket, None], [None, gives_text]) as client:
            for _ in range(2):
                await client.post("/v1/completions", json={"prompt": "p"})
                reply = await client.get("/v1/models")
                assert (reply.status, await reply.json()) == (200, {"data": []})
            await client.post("/v1/completions", json={"prompt": "p"})
            health = await client.get("/health")
            shown = await health.json()
            assert (health.status, shown["engines"], shown["refusing"]) == (503, gone, gone)
        async with Fleet([None], [None]) as client:
            assert (await client.get("/v1/models")).status == 502

    asyncio.run(run())


def test_an_engine_that_refuses_is_asked_last_until_its_pause_is_over() -> None:
    now = [0.0]
    side = Side(["a", "b", "c"], lambda: now[0])
    assert [side.in_turn()[0] for _ in range(4)] == ["a", "b", "c", "a"]
    side.refused("b", "it drains")
    assert {side.in_turn()[-1] for _ in range(3)} == {"b"}
    now[0] = 1.5
    assert side.refusing() == []
    assert {side.in_turn()[0] for _ in range(3)} == {"a", "b", "c"}


# -------------------------------------------------------------------------------------------------- both at once


def test_both_engines_get_the_request_with_one_hand_over_id() -> None:
    body = {"prompt": "p", "max_tokens": 9, "min_tokens": 3}
    fleet = concurrent(gives_ticket, gives_text)
    ((status, text, health),) = send(fleet, body)
    assert (status, text_of(text)) == (200, "hello")
    (asked,), (answered,) = fleet.prefill[0].asked, fleet.decode[0].asked
    to_prefill, to_decode = asked["kv_transfer_params"], answered["kv_transfer_params"]
    assert to_prefill["kv_stream"] == to_decode["kv_stream"]
    assert set(to_prefill["kv_stream"]) == {"id", "host", "port"}
    assert (to_prefill["do_remote_decode"], to_prefill["do_remote_prefill"]) == (True, False)
    assert (to_decode["do_remote_decode"], to_decode["do_remote_prefill"]) == (False, True)
    assert "remote_block_ids" not in to_decode
    assert (asked["max_tokens"], "min_tokens" in asked) == (1, False)
    assert {**answered, "kv_transfer_params": None} == {**body, "kv_transfer_params": None}
    assert (health["concurrent"], health["prefill_errors"]) == (1, 0)
    tickets = EarlyTickets(["http://a/"], [("h", 1)])
    assert len({tickets.new("http://a")["id"] for _ in range(50)}) == 50


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

    assert send(concurrent(waits, comes_before_the_ticket), {"prompt": "p"})[0].status == 200


@pytest.mark.parametrize("gone", [None, fails, drains, dies_at_once])
def test_a_prefill_engine_that_fails_costs_no_answer(gone: Handler | None) -> None:
    fleet = concurrent(gone, gives_text)
    ((status, text, health),) = send(fleet, {"prompt": "p"})
    assert (status, text_of(text)) == (200, "hello")
    assert (len(fleet.tickets), health["decode_errors"]) == (1, 0)


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

    fleet = concurrent(fails_and_notes, waits_for_the_prompt)
    assert send(fleet, {"model": "m", "prompt": "p"})[0].status == 200
    first, second = fleet.prefill[0].asked
    stream = fleet.tickets[0]["kv_stream"]
    assert second["kv_transfer_params"] == {**first["kv_transfer_params"], "kv_stream": {**stream, "withdraw": True}}
    assert (second["model"], second["prompt"], second["max_tokens"]) == ("m", [0], 1)
    assert len(set(fleet.prefill[0].headers)) == 2, "engines tell requests apart by this id"


def test_a_request_that_both_refuse_is_the_clients_business() -> None:
    ((status, text, health),) = send(concurrent(refuses, refuses), {"prompt": "p"})
    assert (status, json.loads(text), health["prefill_errors"]) == (400, {"error": "too long"}, 0)


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
        async with concurrent(never_ends, streams) as client:
            reply = await client.post("/v1/completions", json={"prompt": "p", "stream": True})
            text = await reply.text()
            await asyncio.wait_for(left.wait(), 10)
        return text

    assert asyncio.run(run()) == STREAMED


@pytest.mark.parametrize(("gone", "prefills"), [(drains, 1), (dies_at_once, 2)])
def test_an_early_ticket_that_was_not_used_goes_to_the_next_engine(gone: Handler, prefills: int) -> None:
    fleet = concurrent(gives_ticket, gone, gives_text)
    assert send(fleet, {"prompt": "p"})[0].status == 200
    first, second = fleet.tickets
    assert (first["kv_stream"] == second.get("kv_stream")) is (prefills == 1)
    assert len(fleet.prefill[0].asked) == prefills


def test_engines_of_the_fleet_take_the_routers_mac() -> None:
    from kv_scheduler_state.hosts import HostPolicy
    from kv_scheduler_state.ticket.early import read_early
    from kv_scheduler_state.ticket.seal import TicketSeal

    fleet = concurrent(gives_ticket, gives_text, secret=SECRET)
    send(fleet, {"prompt": "p"})
    read = read_early(fleet.tickets[0], HostPolicy(), TicketSeal((SECRET,)))
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
    assert parse_side_channel("h:1") == ("h", 1)


@pytest.mark.parametrize(
    ("channels", "secret", "words"),
    [
        *(([channel], "", "--concurrent") for channel in ("5600", "h:0", "h:x", ":1")),
        (["a:1", "b:2"], "", "--concurrent"),
        (["h:1"], "missing", "No such file"),
        (["h:1"], "empty", "--concurrent"),
    ],
)
def test_invalid_side_channels_and_secrets_are_refused_at_the_start(
    tmp_path: Path, channels: list[str], secret: str, words: str
) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(DevError, match=words):
        early_tickets(["http://a"], channels, str(tmp_path / secret) if secret else "")
