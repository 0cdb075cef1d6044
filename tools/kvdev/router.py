"""A demo router between prefill and decode engines: OpenAI-compatible, async, streaming. For tests and demos only.

For service take vllm-router, llm-d, Ray Serve LLM or Dynamo: this one knows nothing of load, prefixes or access rights.

For each request it asks a prefill engine for one token, takes the hand-over ticket (`kv_transfer_params`) out of the answer
and forwards the original body with that ticket to a decode engine, whose answer it relays as it comes. Without a ticket the
decode engine simply computes the prompt itself.

With `--concurrent` it sends each request to both engines at once, with one hand-over id, and relays the decode engine's answer. A
prefill engine that fails costs no answer then either: the router withdraws the hand-over, and the decode engine computes the
prompt by itself. The time
of the prefill engine's answer is then a comment at the end of a stream, `: prefill-ms 107.8`, where otherwise the header
`X-Prefill-Ms` has it: the decode engine's answer may begin first.

A ticket belongs to one prompt, however many choices are asked for: prefill is asked for one choice, and not at all where a
body has several prompts.

A request that a dead or draining engine refuses goes to another one, as long as nothing of its answer has gone to the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from kvdev.backends import ABOUT, Refusal, Side, check_first_event, is_aborted, says_something
from kvdev.early import EarlyTickets, add_early_options, early_tickets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

__all__ = ["make_app", "serve_forever"]

_PATHS = ("/v1/completions", "/v1/chat/completions")
_PREFILL_TIMEOUT = aiohttp.ClientTimeout(total=600)
_DECODE_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5)
_MAX_BODY_BYTES = 64 * 2**20
_ATTEMPTS = 6
"""Decode engines that a request is offered to, one after the other, the same ones again after a while."""
_PAUSE_S = 0.25
_NO_ANSWER = (aiohttp.ClientError, TimeoutError, json.JSONDecodeError)
# Request to a prefill engine: keep the blocks, tell where they are. Source: vLLM's router contract.
_ASK_TICKET: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class _Job:
    """A client's request on its way."""

    request: web.Request
    body: dict[str, Any]
    headers: dict[str, str]
    ticket: dict[str, Any] | None = None
    prefill_ms: float = 0.0
    passed_on: web.Response | None = field(default=None)
    """A prefill engine's refusal of the request itself: the client's business."""
    beside: _Job | None = None
    """The same request on its way to a prefill engine at the same time."""


class _Router:
    """Both sides of the fleet, with counters."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], early: EarlyTickets | None) -> None:
        self.prefill, self.decode = Side(prefill), Side(decode)
        self.early = early
        names = ("concurrent", "requests", "tickets", "no_ticket", "prefill_errors", "decode_errors", "retries")
        self.counts = dict.fromkeys(names, 0)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.counts["requests"] += 1
        try:
            body = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            return _error(400, "the body is not JSON")
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        job = _Job(request, body, headers)
        if self.early is not None and _is_one_prompt(body):
            return await self._answer_beside(job, self.early)
        await self._fetch_ticket(job)
        self.counts["tickets" if job.ticket is not None else "no_ticket"] += job.passed_on is None
        return job.passed_on or await self._answer(job)

    # ------------------------------------------------------------------------------------------- both at once

    async def _answer_beside(self, job: _Job, early: EarlyTickets) -> web.StreamResponse:
        """Relay a decode engine's answer to a request that goes to a prefill engine at the same time."""
        self.counts["concurrent"] += 1
        url = self.prefill.in_turn()[0]
        stream = early.new(url)
        job.ticket = {"do_remote_prefill": True, "do_remote_decode": False, "kv_stream": stream}
        job.beside = _Job(job.request, job.body, job.headers)
        beside = asyncio.create_task(self._prefill_beside(job.beside, url, stream))
        await asyncio.sleep(0)  # the prefill engine's request leaves first: both wait for its answer
        try:
            return await self._answer(job)
        finally:
            # It has ended, unless the decode engine needed it no more, or the client has left.
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)

    async def _prefill_beside(self, job: _Job, url: str, stream: Mapping[str, object]) -> None:
        """Let a prefill engine compute a prompt; if it will not, withdraw the hand-over, and the decode engine computes it."""
        started = time.perf_counter()
        try:
            await self._ask_prefill(job, url, {**_ASK_TICKET, "kv_stream": stream})
            job.prefill_ms = 1e3 * (time.perf_counter() - started)
            self.prefill.answered(url)
        except Refusal as refusal:
            self.counts["prefill_errors"] += 1
            self.prefill.refused(url, refusal)
        else:
            if job.passed_on is None:
                return
        await self._withdraw(job, url, stream)

    async def _withdraw(self, job: _Job, url: str, stream: Mapping[str, object]) -> None:
        """Tell a prefill engine that a prompt will not come; else the decode engine waits for it, 30 s by default."""
        body = {
            **{key: job.body[key] for key in ("model",) if key in job.body},
            "prompt": [0],
            "max_tokens": 1,
            "kv_transfer_params": {**_ASK_TICKET, "kv_stream": {**stream, "withdraw": True}},
        }
        headers = {**job.headers, "X-Request-Id": uuid.uuid4().hex}
        session = job.request.app[_SESSION]
        with suppress(*_NO_ANSWER):
            async with session.post(url + _PATHS[0], json=body, headers=headers, timeout=_HEALTH_TIMEOUT) as reply:
                await reply.read()

    # ------------------------------------------------------------------------------------------------------ prefill

    async def _fetch_ticket(self, job: _Job) -> None:
        """Put a prefill engine's ticket into the job, None for no hand-over, or its refusal of the request itself."""
        job.ticket = None
        if not _is_one_prompt(job.body):
            return
        started = time.perf_counter()
        for url in self.prefill.in_turn():
            try:
                await self._ask_prefill(job, url)
                self.prefill.answered(url)
                break
            except Refusal as refusal:
                # A prefill engine that is down costs time, not answers: the decode engine can compute the prompt itself.
                self.counts["prefill_errors"] += 1
                self.prefill.refused(url, refusal)
        job.prefill_ms = 1e3 * (time.perf_counter() - started)

    async def _ask_prefill(self, job: _Job, url: str, params: Mapping[str, object] = _ASK_TICKET) -> None:
        short = {k: v for k, v in job.body.items() if k not in {"stream_options", "min_tokens", "best_of"}}
        short |= {"stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": params}
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        session = job.request.app[_SESSION]
        try:
            async with session.post(
                url + job.request.path, json=short, headers=job.headers, timeout=_PREFILL_TIMEOUT
            ) as reply:
                if 400 <= reply.status < 500:
                    body = await reply.read()
                    job.passed_on = web.Response(status=reply.status, body=body, content_type="application/json")
                    return
                reply.raise_for_status()
                answer = await reply.json()
        except _NO_ANSWER as error:
            raise Refusal(_said(error)) from error
        if is_aborted(answer):
            raise Refusal("it drains")
        ticket = answer.get("kv_transfer_params")
        job.ticket = ticket if isinstance(ticket, dict) else None

    # ------------------------------------------------------------------------------------------------------- decode

    async def _answer(self, job: _Job) -> web.StreamResponse:
        """Relay a decode engine's answer; offer the request to another engine while nothing has gone to the client."""
        reason = ""
        for attempt in range(_ATTEMPTS):
            # A second round over the same engines is worth a pause: one may be starting.
            await asyncio.sleep(_PAUSE_S * (attempt // len(self.decode.urls)))
            url = self.decode.in_turn()[0]
            try:
                answer = await self._relay(job, url)
                self.decode.answered(url)
                return answer  # noqa: TRY300  (the next line is of a refusal)
            except Refusal as refusal:
                reason = f"{url}: {refusal}"
                self.counts["decode_errors"] += 1
                self.decode.refused(url, refusal)
                # A ticket that two engines refuse is perhaps spent, or its lease is over.
                if refusal.has_seen_ticket or attempt % 2:
                    await self._fetch_ticket(job)
                if job.passed_on is not None:
                    return job.passed_on
                self.counts["retries"] += attempt + 1 < _ATTEMPTS
        return _error(502, f"the decode engine did not answer: {reason}")

    async def _relay(self, job: _Job, url: str) -> web.StreamResponse:
        body = {k: v for k, v in job.body.items() if k != "kv_transfer_params"}
        if job.ticket is not None:
            body["kv_transfer_params"] = job.ticket
        session = job.request.app[_SESSION]
        try:
            async with session.post(
                url + job.request.path, json=body, headers=job.headers, timeout=_DECODE_TIMEOUT
            ) as reply:
                if reply.status >= 500:
                    raise Refusal(f"HTTP {reply.status}: {(await reply.text())[:200]}", has_seen_ticket=False)
                if reply.content_type == "text/event-stream":
                    return await self._relay_stream(job, reply)
                return await _relay_whole(job, reply)
        except aiohttp.ClientConnectorError as error:
            raise Refusal(_said(error), has_seen_ticket=False) from error
        except _NO_ANSWER as error:
            raise Refusal(_said(error)) from error

    async def _relay_stream(self, job: _Job, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        """Relay events as they come, from the first that says something on; end a broken stream with an error event."""
        held, first = b"", b""
        async for chunk in reply.content.iter_any():
            held += chunk
            first = next(filter(says_something, held.split(b"\n")[:-1]), b"")
            if first:
                break
        check_first_event(first)
        response = _prepared_like(reply, job)
        try:
            is_there = await _sent(job, response, held)
            while is_there and (chunk := await reply.content.readany()):
                is_there = await _sent(job, response, chunk)
        except _NO_ANSWER as error:
            self.counts["decode_errors"] += 1
            await _end_broken(job.request, response, _said(error))
            return response
        if is_there:
            if job.beside is not None and job.beside.prefill_ms:
                await _sent(job, response, f": prefill-ms {job.beside.prefill_ms:.1f}\n\n".encode())
            await response.write_eof()
        return response

    # ------------------------------------------------------------------------------------------------------- looking

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 if each engine does, else 503 with the names of those that do not; name those that refuse, too."""
        session = request.app[_SESSION]
        urls = [*self.prefill.urls, *self.decode.urls]
        answers = await asyncio.gather(*(_answers(session, url) for url in urls))
        silent = [url for url, is_up in zip(urls, answers, strict=True) if not is_up]
        status = {"status": "engines do not answer", "engines": silent} if silent else {"status": "ok"}
        refusing = [*self.prefill.refusing(), *self.decode.refusing()]
        return web.json_response({**status, "refusing": refusing, **self.counts}, status=503 if silent else 200)

    async def models(self, request: web.Request) -> web.Response:
        why: object = ""
        for url in self.decode.in_turn():
            try:
                async with request.app[_SESSION].get(url + "/v1/models", timeout=_HEALTH_TIMEOUT) as reply:
                    return web.json_response(await reply.json(), status=reply.status)
            except _NO_ANSWER as error:
                why = _said(error)
        return _error(502, f"the decode engine did not answer: {why}")


async def _relay_whole(job: _Job, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    """Relay an answer of one piece, once all of it is there."""
    body = await reply.read()
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if is_aborted(answer):
        raise Refusal("it drains", has_seen_ticket=any(choice.get("text") for choice in answer["choices"]))
    response = _prepared_like(reply, job)
    if await _sent(job, response, body):
        await response.write_eof()
    return response


async def _sent(job: _Job, response: web.StreamResponse, data: bytes) -> bool:
    """Send a part of an answer; False if the client has left, which is no fault of the engine that answers."""
    try:
        if not response.prepared:
            await response.prepare(job.request)
        await response.write(data)
    except ConnectionResetError:
        return False
    return True


def _prepared_like(reply: aiohttp.ClientResponse, job: _Job) -> web.StreamResponse:
    response = web.StreamResponse(status=reply.status)
    response.content_type = reply.content_type
    response.headers["X-Prefill-Ms"] = f"{job.prefill_ms:.1f}"
    return response


async def _end_broken(request: web.Request, response: web.StreamResponse, reason: str) -> None:
    """Tell a client in the middle of its stream that there is no more to come, by an event and by an unfinished body."""
    message = f"the decode engine broke off: {reason}"
    event = {"error": {"message": message, "type": "router_error", "code": 502}}
    # An event that was cut in its middle ends at the blank line.
    await response.write(f"\n\ndata: {json.dumps(event)}\n\n".encode())
    if request.transport is not None:
        request.transport.close()


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


_SESSION = web.AppKey("session", aiohttp.ClientSession)


def make_app(prefill: Sequence[str], decode: Sequence[str], early: EarlyTickets | None = None) -> web.Application:
    """Return the router as an aiohttp application in front of these engines (base URLs); with early tickets, of both at once."""
    router = _Router(prefill, decode, early)
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


def serve_forever(
    prefill: Sequence[str], decode: Sequence[str], *, host: str, port: int, early: EarlyTickets | None = None
) -> int:
    """Serve until interrupted; return 1 without serving if an address is no address."""
    wrong = [url for url in (*prefill, *decode) if not _is_base_url(url)]
    if wrong:
        print(f"router: not the address of an engine: {', '.join(wrong)}; write http://HOST:PORT", flush=True)
        return 1

    async def run() -> None:
        runner = web.AppRunner(make_app(prefill, decode, early))
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
    parser = argparse.ArgumentParser(description=ABOUT)
    parser.add_argument("--prefill", action="append", required=True)
    parser.add_argument("--decode", action="append", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    add_early_options(parser)
    chosen = parser.parse_args()
    both = early_tickets(chosen.prefill, chosen.concurrent, chosen.secret_file)
    raise SystemExit(serve_forever(chosen.prefill, chosen.decode, host=chosen.host, port=chosen.port, early=both))
