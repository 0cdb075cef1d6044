"""The router between stand-in engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from stand_ins import (
    TICKET,
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
from kvdev.backends import Side
from kvdev.router import make_app, serve_forever


def ask(prefill: Handler | None, decode: Handler | None, body: Any, path: str = "/v1/completions") -> Any:
    """Send one body through a router; return (status, text, prefill stand-in, decode stand-in, router health)."""

    async def run() -> Any:
        engines = [StandIn(handler or gives_text) for handler in (prefill, decode)]
        for engine, handler in zip(engines, (prefill, decode), strict=True):
            await engine.server.start_server()
            if handler is None:
                await engine.server.close()
        urls = [
            engine.url if handler else "http://127.0.0.1:1"
            for engine, handler in zip(engines, (prefill, decode), strict=True)
        ]
        async with TestClient(TestServer(make_app([urls[0]], [urls[1]]))) as client:
            data = body if isinstance(body, str) else json.dumps(body)
            reply = await client.post(path, data=data, headers={"Content-Type": "application/json"})
            text = await reply.text()
            health = await (await client.get("/health")).json()
        for engine, handler in zip(engines, (prefill, decode), strict=True):
            if handler is not None:
                await engine.server.close()
        return reply.status, text, engines[0], engines[1], health

    return asyncio.run(run())


def test_the_ticket_goes_from_prefill_to_decode_and_the_body_stays() -> None:
    body = {
        "prompt": "p",
        "max_tokens": 9,
        "stream_options": {"include_usage": True},
        "min_tokens": 3,
        "temperature": 0,
    }
    status, text, prefill, decode, health = ask(gives_ticket, gives_text, body)
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, "hello")
    asked = prefill.asked[0]
    assert (asked["max_tokens"], asked["stream"], asked["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
    assert "stream_options" not in asked
    assert "min_tokens" not in asked
    assert decode.asked[0] == {**body, "kv_transfer_params": TICKET}
    assert prefill.headers == decode.headers != [""]
    assert health["tickets"] == 1


def test_a_stream_is_relayed_as_it_comes() -> None:
    status, text, *_ = ask(gives_ticket, streams, {"prompt": "p", "stream": True}, "/v1/chat/completions")
    assert (status, text) == (200, "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n")


def test_a_dead_prefill_engine_costs_no_answer() -> None:
    status, _, _, decode, health = ask(None, gives_text, {"prompt": "p"})
    assert status == 200
    assert "kv_transfer_params" not in decode.asked[0]
    assert health["prefill_errors"] == 1


def test_a_prefill_answer_without_a_ticket_is_no_hand_off() -> None:
    status, _, _, decode, health = ask(gives_text, gives_text, {"prompt": "p"})
    assert status == 200
    assert "kv_transfer_params" not in decode.asked[0]
    assert health["no_ticket"] == 1


def test_a_clients_own_ticket_goes_nowhere() -> None:
    _, _, prefill, decode, _ = ask(gives_text, gives_text, {"prompt": "p", "kv_transfer_params": {"evil": 1}})
    assert "evil" not in prefill.asked[0]["kv_transfer_params"]
    assert "kv_transfer_params" not in decode.asked[0]


def test_a_refusal_of_the_prefill_engine_is_passed_on() -> None:
    status, text, _, decode, _ = ask(refuses, gives_text, {"prompt": "p"})
    assert (status, json.loads(text)) == (400, {"error": "too long"})
    assert decode.asked == []


def test_a_dead_decode_engine_is_a_502() -> None:
    status, text, *_ = ask(gives_ticket, None, {"prompt": "p"})
    assert status == 502
    assert "did not answer" in text


def test_a_body_that_is_no_json_object_is_a_400() -> None:
    for body in ("{", "[1]", '"x"'):
        assert ask(gives_ticket, gives_text, body)[0] == 400


def test_prefill_is_asked_for_one_choice_and_decode_for_all_of_them() -> None:
    _, _, prefill, decode, _ = ask(gives_ticket, gives_text, {"prompt": "p", "n": 4, "best_of": 4})
    assert prefill.asked[0]["n"] == 1
    assert "best_of" not in prefill.asked[0]
    assert decode.asked[0]["n"] == 4


def test_a_body_with_several_prompts_is_no_hand_off() -> None:
    for prompts in (["p", "q"], [[1, 2], [3]]):
        status, _, prefill, decode, health = ask(gives_ticket, gives_text, {"prompt": prompts})
        assert (status, prefill.asked, decode.asked[0]) == (200, [], {"prompt": prompts})
        assert health["no_ticket"] == 1
    for one in ([1, 2], ["p"], [[1, 2]]):
        assert len(ask(gives_ticket, gives_text, {"prompt": one})[2].asked) == 1


async def dies_in_the_middle(request: web.Request) -> web.StreamResponse:
    response = await streams(request)
    assert request.transport is not None
    request.transport.abort()
    return response


def test_a_decode_engine_that_dies_in_its_answer_ends_the_clients_connection() -> None:
    async def run() -> None:
        engines = [StandIn(gives_ticket), StandIn(dies_in_the_middle)]
        for engine in engines:
            await engine.server.start_server()
        async with TestClient(TestServer(make_app([engines[0].url], [engines[1].url]))) as client:
            reply = await client.post("/v1/completions", json={"prompt": "p"})
            with pytest.raises(ClientError):
                await asyncio.wait_for(reply.read(), timeout=10)
            assert (await (await client.get("/health")).json())["decode_errors"] == 1
        for engine in engines:
            await engine.server.close()

    asyncio.run(run())


def test_health_and_models_say_that_an_engine_is_down() -> None:
    async def run() -> None:
        async with TestClient(TestServer(make_app(["http://127.0.0.1:1"], ["http://127.0.0.1:1/"]))) as client:
            health = await client.get("/health")
            assert (health.status, (await health.json())["engines"]) == (503, ["http://127.0.0.1:1"] * 2)
            assert (await client.get("/v1/models")).status == 502

    asyncio.run(run())


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:8000", "http://", "http://host:port", "ftp://host"])
def test_what_is_no_address_of_an_engine_is_refused_at_the_start(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_forever(["http://127.0.0.1:1"], [url], host="127.0.0.1", port=0) == 1
    assert url in capsys.readouterr().out


def test_a_port_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_forever(["http://127.0.0.1:1"], ["http://127.0.0.1:1"], host="127.0.0.1", port=99999) == 1
    assert "99999" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- two engines on each side


class Fleet:
    """Two stand-ins per side and a router; None for an engine that is not there."""

    def __init__(self, prefill: list[Handler | None], decode: list[Handler | None]) -> None:
        self.prefill = [StandIn(handler or gives_text) for handler in prefill]
        self.decode = [StandIn(handler or gives_text) for handler in decode]
        self._engines = list(zip([*self.prefill, *self.decode], [*prefill, *decode], strict=True))

    async def __aenter__(self) -> TestClient[Any, Any]:
        for engine, handler in self._engines:
            if handler is not None:
                await engine.server.start_server()
        app = make_app([self._url(e) for e in self.prefill], [self._url(e) for e in self.decode])
        self.client = TestClient(TestServer(app))
        await self.client.start_server()
        return self.client

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for engine, handler in self._engines:
            if handler is not None:
                await engine.server.close()

    def _url(self, engine: StandIn) -> str:
        handlers = {id(one): handler for one, handler in self._engines}
        return engine.url if handlers[id(engine)] is not None else "http://127.0.0.1:1"

    @property
    def tickets(self) -> list[Any]:
        """Tickets that reached a decode engine."""
        return [body.get("kv_transfer_params") for engine in self.decode for body in engine.asked]


async def drains_in_a_stream(request: web.Request) -> web.StreamResponse:
    return await said_in_a_stream(
        request,
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": ""}, "finish_reason": "abort"}]},
    )


async def fails_in_a_stream(request: web.Request) -> web.StreamResponse:
    return await said_in_a_stream(request, {"error": {"message": "Internal server error", "code": 500}})


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


def several(fleet: Fleet, body: dict[str, Any], times: int = 4) -> list[tuple[int, str]]:
    """Send a body so often; return statuses and texts."""

    async def run() -> list[tuple[int, str]]:
        answers: list[tuple[int, str]] = []
        async with fleet as client:
            for _ in range(times):
                reply = await client.post("/v1/completions", json=body)
                answers.append((reply.status, await reply.text()))
        return answers

    return asyncio.run(run())


@pytest.mark.parametrize("gone", [None, drains, is_ending, fails, dies_at_once])
def test_a_prefill_engine_that_refuses_is_replaced_by_the_other(gone: Handler | None) -> None:
    fleet = Fleet([gone, gives_ticket], [gives_text, gives_text])
    assert {status for status, _ in several(fleet, {"prompt": "p"})} == {200}
    assert fleet.tickets == [TICKET] * 4


@pytest.mark.parametrize(("gone", "prefills"), [(None, 1), (drains, 1), (is_ending, 1), (dies_at_once, 2)])
def test_a_decode_engine_that_refuses_is_replaced_by_the_other(gone: Handler | None, prefills: int) -> None:
    """A ticket that the engine cannot have used goes to the next one; else the prompt is handed over anew."""
    fleet = Fleet([gives_ticket, gives_ticket], [gone, gives_text])
    ((status, text),) = several(fleet, {"prompt": "p"}, times=1)
    assert (status, json.loads(text)) == (200, {"choices": [{"text": "hello"}]})
    assert sum(len(engine.asked) for engine in fleet.prefill) == prefills
    assert set(map(str, fleet.tickets)) == {str(TICKET)}


def test_a_ticket_that_two_engines_refuse_is_replaced() -> None:
    refusals = iter([fails, fails])

    async def refuses_twice(request: web.Request) -> web.StreamResponse:
        return await next(refusals, gives_text)(request)

    fleet = Fleet([gives_ticket, gives_ticket], [refuses_twice, refuses_twice])
    ((status, _),) = several(fleet, {"prompt": "p"}, times=1)
    assert status == 200
    assert sum(len(engine.asked) for engine in fleet.prefill) == 2
    assert fleet.tickets == [TICKET] * 3


@pytest.mark.parametrize("gone", [drains_in_a_stream, fails_in_a_stream, dies_at_once])
def test_a_stream_of_which_the_client_saw_nothing_begins_again_elsewhere(gone: Handler) -> None:
    answers = several(Fleet([gives_ticket, gives_ticket], [gone, streams]), {"prompt": "p", "stream": True})
    assert answers == [(200, "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n")] * 4


def test_a_request_that_all_engines_refuse_is_a_502_that_says_why() -> None:
    ((status, text),) = several(Fleet([gives_ticket], [drains, drains]), {"prompt": "p"}, times=1)
    assert status == 502
    assert "it drains" in text


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    seen: list[bytes] = []

    async def run() -> None:
        async with Fleet([gives_ticket], [dies_in_the_middle]) as client:
            reply = await client.post("/v1/completions", json={"prompt": "p", "stream": True})
            async for line in reply.content:
                seen.append(line.strip())  # noqa: PERF401  (those before the end of the connection are kept)

    with pytest.raises(ClientError):
        asyncio.run(asyncio.wait_for(run(), timeout=10))
    last = [line for line in seen if line][-1]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == (502, "router_error")


def test_a_client_that_leaves_is_no_fault_of_the_engine() -> None:
    """Nobody is asked again for it, and the engine that still talks is told by the end of its connection."""
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
            runner = web.AppRunner(make_app([fleet.prefill[0].url], [fleet.decode[0].url]))
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
        fleet = Fleet([gives_ticket, None], [None, gives_text])
        async with fleet as client:
            for _ in range(2):
                await client.post("/v1/completions", json={"prompt": "p"})
                reply = await client.get("/v1/models")
                assert (reply.status, await reply.json()) == (200, {"data": []})
            await client.post("/v1/completions", json={"prompt": "p"})
            health = await client.get("/health")
            told = await health.json()
            assert (health.status, told["engines"], told["refusing"]) == (
                503,
                ["http://127.0.0.1:1"] * 2,
                ["http://127.0.0.1:1"] * 2,
            )

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


def test_the_router_says_that_it_is_a_demo_and_names_those_for_service(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["router", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for words in ("demo", "not for service", "vllm-router", "llm-d", "Ray Serve LLM", "Dynamo"):
        assert words in told
