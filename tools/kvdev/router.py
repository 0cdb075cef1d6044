"""A small prefill/decode router for tests and demos: OpenAI-compatible, async, streaming.

For each request it asks a prefill engine for one token, takes the hand-off ticket (`kv_transfer_params`) out of the answer
and forwards the original body with that ticket to a decode engine, whose answer it relays as it comes. Without a ticket the
decode engine simply computes the prompt itself.

A ticket belongs to one prompt, however many choices are asked for: prefill is asked for one choice, and not at all where a
body has several prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

__all__ = ["make_app", "serve_forever"]

_PATHS = ("/v1/completions", "/v1/chat/completions")
_PREFILL_TIMEOUT = aiohttp.ClientTimeout(total=600)
_DECODE_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)
_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5)
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
        self.urls = [url.rstrip("/") for url in (*prefill, *decode)]
        self.prefill = itertools.cycle(self.urls[: len(prefill)])
        self.decode = itertools.cycle(self.urls[len(prefill) :])
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
        answer = await self._ask_prefill(session, request.path, body, headers) if _is_one_prompt(body) else None
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
        short = {k: v for k, v in body.items() if k not in {"stream_options", "min_tokens", "best_of"}}
        short |= {"stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": _ASK_TICKET}
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
        response: web.StreamResponse | None = None
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
            if response is None or not response.prepared:
                return _error(502, f"the decode engine did not answer: {error}")
            # Part of the answer is out: an end of the connection in its middle is all that can still say "failed".
            if request.transport is not None:
                request.transport.abort()
            return response

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 if each engine does, else 503 with the names of those that do not."""
        session = request.app[_SESSION]
        silent = [url for url in self.urls if not await _answers(session, url)]
        status = {"status": "engines do not answer", "engines": silent} if silent else {"status": "ok"}
        return web.json_response({**status, **self.counts}, status=503 if silent else 200)

    async def models(self, request: web.Request) -> web.Response:
        try:
            async with request.app[_SESSION].get(next(self.decode) + "/v1/models") as reply:
                return web.json_response(await reply.json(), status=reply.status)
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
            return _error(502, f"the decode engine did not answer: {error}")


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


def _is_one_prompt(body: dict[str, Any]) -> bool:
    """Tell whether a body has one prompt: a text or one list of token ids, not a list of either."""
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or not prompt or len(prompt) == 1 or isinstance(prompt[0], int)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url + "/health", timeout=_HEALTH_TIMEOUT) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def serve_forever(prefill: Sequence[str], decode: Sequence[str], *, host: str, port: int) -> int:
    """Serve until interrupted; return 1 without serving if an address is no address."""
    wrong = [url for url in (*prefill, *decode) if not _is_base_url(url)]
    if wrong:
        print(f"router: not the address of an engine: {', '.join(wrong)}; write http://HOST:PORT", flush=True)
        return 1

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
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        print(f"router: cannot listen on {host}:{port}: {why}; choose another --port", flush=True)
        return 1
    return 0


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prefill", action="append", required=True)
    parser.add_argument("--decode", action="append", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    raise SystemExit(serve_forever(chosen.prefill, chosen.decode, host=chosen.host, port=chosen.port))
