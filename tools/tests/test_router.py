"""The router between stand-in engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import TestClient, TestServer

from kvdev.router import make_app, serve_forever

TICKET = {"do_remote_prefill": True, "remote_engine_id": "P", "remote_block_ids": [[1, 2]]}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StandIn:
    """An engine that remembers what it was asked."""

    def __init__(self, answer: Handler) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self._answer = answer
        app = web.Application()
        app.router.add_post("/v1/completions", self._handle)
        app.router.add_post("/v1/chat/completions", self._handle)
        self.server = TestServer(app)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(request.headers.get("X-Request-Id", ""))
        return await self._answer(request)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


async def gives_ticket(_: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": TICKET})


async def gives_text(_: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "hello"}]})


async def streams(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for word in ("data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"):
        await response.write(word.encode())
    return response


async def refuses(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "too long"}, status=400)


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
