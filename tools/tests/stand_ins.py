"""Stand-in engines, and fleets of them behind the router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvdev.early import EarlyTickets
from kvdev.router import make_app

__all__ = [
    "TICKET", "Fleet", "Handler", "StandIn", "dies_at_once", "drains", "fails", "gives_text", "gives_ticket", "refuses",
    "send", "streams",
]  # fmt: skip

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
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self.server = TestServer(app)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(request.headers.get("X-Request-Id", ""))
        return await self._answer(request)

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"data": []})

    async def _health(self, _: web.Request) -> web.StreamResponse:
        return web.Response()

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


class Fleet:
    """Stand-ins and a router in front of them; None for an engine that is not there.

    With `channels` the router sends each request to both engines at once, and covers these side channels by `secret`.
    """

    def __init__(
        self,
        prefill: Sequence[Handler | None],
        decode: Sequence[Handler | None],
        channels: Sequence[tuple[str, int]] = (),
        secret: bytes | None = None,
    ) -> None:
        self.prefill = [StandIn(handler or gives_text) for handler in prefill]
        self.decode = [StandIn(handler or gives_text) for handler in decode]
        self._handlers = [*prefill, *decode]
        self._channels, self._secret = channels, secret

    async def __aenter__(self) -> TestClient[Any, Any]:
        engines = [*self.prefill, *self.decode]
        self._up = [engine for engine, handler in zip(engines, self._handlers, strict=True) if handler is not None]
        for engine in self._up:
            await engine.server.start_server()
        urls = [engine.url if engine in self._up else "http://127.0.0.1:1" for engine in engines]
        self.urls = urls[: len(self.prefill)], urls[len(self.prefill) :]
        early = EarlyTickets(self.urls[0], self._channels, self._secret) if self._channels else None
        self.client = TestClient(TestServer(make_app(*self.urls, early)))
        await self.client.start_server()
        return self.client

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for engine in self._up:
            await engine.server.close()

    @property
    def tickets(self) -> list[Any]:
        """Tickets that reached a decode engine."""
        return [body.get("kv_transfer_params") for engine in self.decode for body in engine.asked]


class Answer(NamedTuple):
    """A reply of the router, and its counters afterwards."""

    status: int
    text: str
    health: dict[str, Any]


def send(fleet: Fleet, body: Any, path: str = "/v1/completions", times: int = 1) -> list[Answer]:
    """Send a body through a fleet's router so often."""

    async def run() -> list[Answer]:
        answers = []
        async with fleet as client:
            for _ in range(times):
                data = body if isinstance(body, str) else json.dumps(body)
                reply = await client.post(path, data=data, headers={"Content-Type": "application/json"})
                text = await reply.text()
                health = await (await client.get("/health")).json()
                answers.append(Answer(reply.status, text, health))
        return answers

    return asyncio.run(asyncio.wait_for(run(), 30))


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


async def drains(_: web.Request) -> web.StreamResponse:
    """Answer as vLLM does between SIGTERM and its end."""
    return web.json_response({"choices": [{"text": "", "finish_reason": "abort"}]})


async def fails(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "KV load failure"}}, status=500)


async def dies_at_once(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
