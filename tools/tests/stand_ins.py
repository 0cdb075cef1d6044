"""Stand-in engines for tests of the router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

__all__ = [
    "TICKET", "Handler", "StandIn", "dies_at_once", "drains", "fails", "gives_text", "gives_ticket", "refuses", "streams",
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
