"""A small prefill/decode router: OpenAI-compatible, async, streaming.

For each request it asks a prefill engine for one token, takes the hand-off ticket (`kv_transfer_params`) out of the answer
and forwards the original body with that ticket to a decode engine, whose answer it relays as it comes. Without a ticket the
decode engine simply computes the prompt itself.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

__all__ = ["make_app", "serve_forever"]

_PATHS = ("/v1/completions", "/v1/chat/completions")
_PREFILL_TIMEOUT = aiohttp.ClientTimeout(total=600)
_DECODE_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)
_MAX_BODY_BYTES = 64 * 2**20
# Request to a prefill engine: keep the blocks, tell where they are. Source: vLLM's router contract.
_ASK_TICKET: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Router:
    """Round-robin over both fleets, with counters."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.prefill = itertools.cycle([url.rstrip("/") for url in prefill])
        self.decode = itertools.cycle([url.rstrip("/") for url in decode])
        self.counts = {"requests": 0, "tickets": 0, "no_ticket": 0, "prefill_errors": 0, "decode_errors": 0}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.counts["requests"] += 1
        try:
            body = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            return _error(400, "the body is not JSON")
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        session: aiohttp.ClientSession = request.app[_SESSION]
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]

        started = time.perf_counter()
        answer = await self._ask_prefill(session, request.path, body, headers)
        if isinstance(answer, web.Response):
            return answer
        prefill_ms = 1e3 * (time.perf_counter() - started)
        forwarded = {k: v for k, v in body.items() if k != "kv_transfer_params"}
        if answer is not None:
            forwarded["kv_transfer_params"] = answer
        self.counts["tickets" if answer is not None else "no_ticket"] += 1
        return await self._relay_decode(request, session, forwarded, headers, prefill_ms)

    async def _ask_prefill(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | web.Response | None:
        """Return the ticket, None for no hand-off, or the refusal to pass on to the client."""
        short = {k: v for k, v in body.items() if k not in {"stream_options", "min_tokens", "kv_transfer_params"}}
        short |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASK_TICKET}
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        try:
            async with session.post(
                next(self.prefill) + path, json=short, headers=headers, timeout=_PREFILL_TIMEOUT
            ) as reply:
                if 400 <= reply.status < 500:
                    return web.Response(status=reply.status, body=await reply.read(), content_type="application/json")
                reply.raise_for_status()
                ticket = (await reply.json()).get("kv_transfer_params")
                return ticket if isinstance(ticket, dict) else None
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
            # A prefill engine that is down costs time, not answers: the decode engine can compute the prompt itself.
            self.counts["prefill_errors"] += 1
            return None

    async def _relay_decode(
        self,
        request: web.Request,
        session: aiohttp.ClientSession,
        body: dict[str, Any],
        headers: dict[str, str],
        prefill_ms: float,
    ) -> web.StreamResponse:
        try:
            async with session.post(
                next(self.decode) + request.path, json=body, headers=headers, timeout=_DECODE_TIMEOUT
            ) as reply:
                response = web.StreamResponse(status=reply.status)
                response.content_type = reply.content_type
                response.headers["X-Prefill-Ms"] = f"{prefill_ms:.1f}"
                await response.prepare(request)
                async for chunk in reply.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, TimeoutError) as error:
            self.counts["decode_errors"] += 1
            return _error(502, f"the decode engine did not answer: {error}")

    async def health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", **self.counts})

    async def models(self, request: web.Request) -> web.Response:
        async with request.app[_SESSION].get(next(self.decode) + "/v1/models") as reply:
            return web.json_response(await reply.json(), status=reply.status)


_SESSION = web.AppKey("session", aiohttp.ClientSession)


def make_app(prefill: Sequence[str], decode: Sequence[str]) -> web.Application:
    """Return the router as an aiohttp application in front of these engines (base URLs)."""
    router = _Router(prefill, decode)
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.cleanup_ctx.append(_session)
    for path in _PATHS:
        app.router.add_post(path, router.handle)
    app.router.add_get("/health", router.health)
    app.router.add_get("/v1/models", router.models)
    return app


async def _session(app: web.Application) -> AsyncIterator[None]:
    # No connection is used twice: a server that closes an idle one at that moment would fail the request.
    app[_SESSION] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
    yield
    await app[_SESSION].close()


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "router_error", "code": status}}, status=status)


def serve_forever(prefill: Sequence[str], decode: Sequence[str], *, host: str, port: int) -> int:
    """Serve until interrupted."""

    async def run() -> None:
        runner = web.AppRunner(make_app(prefill, decode))
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            print(
                f"router on http://{host}:{port}: prefill {', '.join(prefill)}; decode {', '.join(decode)}", flush=True
            )
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    try:
        asyncio.run(run())
    except OSError as error:
        print(f"router: cannot listen on {host}:{port}: {error.strerror or error}; choose another --port", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prefill", action="append", required=True)
    parser.add_argument("--decode", action="append", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    raise SystemExit(serve_forever(chosen.prefill, chosen.decode, host=chosen.host, port=chosen.port))
