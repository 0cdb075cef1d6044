"""A demo router between prefill and decode engines: OpenAI-compatible, async, streaming. For tests and demos only.

For each request it asks a prefill engine for one token, takes the hand-over ticket (`kv_transfer_params`) out of the answer
and forwards the original body with that ticket to a decode engine, whose answer it relays as it comes. Without a ticket the
decode engine simply computes the prompt itself. With early tickets it sends each request to both engines at once, and withdraws
the hand-over of a prefill engine that fails.

A ticket belongs to one prompt, however many choices are asked for: prefill is asked for one choice, and not at all where a
body has several prompts. A request that a dead or draining engine refuses goes to another one, as long as nothing of its
answer has gone to the client.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from argparse import Namespace
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kv_scheduler_state import prefill_request_params
from kvdev.steps import fail, note

_PATHS = ("/v1/completions", "/v1/chat/completions")
_PREFILL_TIMEOUT = aiohttp.ClientTimeout(total=600)
_DECODE_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
_SHORT_TIMEOUT = aiohttp.ClientTimeout(total=5)
_MAX_BODY_BYTES = 64 * 2**20
_ATTEMPTS = 6
"""Decode engines that a request is offered to, one after the other, the same ones again after a while."""
_PAUSE_S = 0.25
ANOTHER_TICKET = "; asking for another ticket"
"""End of a line about a refusal: the ticket before it may stay unread until its lease ends."""
_NO_ANSWER = (aiohttp.ClientError, TimeoutError, json.JSONDecodeError)


class _Refusal(Exception):  # noqa: N818  (an engine's answer, not a fault of the router)
    """An engine did not answer a request of which nothing has gone to the client.

    `has_seen_ticket`: whether it has probably read by the ticket, as an engine that died in its answer has. One that cannot be
    reached, or that drains, has not: the ticket is good for another one, and must be, lest its lease stays open.
    """

    def __init__(self, reason: object, *, has_seen_ticket: bool = True) -> None:
        super().__init__(str(reason) or type(reason).__name__)
        self.has_seen_ticket = has_seen_ticket


class _Rejected(Exception):  # noqa: N818
    """A prefill engine refused the request itself (HTTP 4xx): the client's business."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.response = web.Response(status=status, body=body, content_type="application/json")


@dataclass
class _Job:
    """A client's request, the headers that engines get, and the ticket once there is one."""

    request: web.Request
    body: dict[str, Any]
    headers: dict[str, str]
    ticket: object = None


class _Router:
    """Both sides of the fleet, whose engines are asked in turn."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], channels: Sequence[tuple[str, int]], secret: bytes | None
    ) -> None:
        self.prefill, self.decode = deque(prefill), deque(decode)
        self.channels = dict(zip(prefill, channels, strict=True)) if channels else {}
        self.secret = secret

    async def connections(self, _app: web.Application) -> AsyncIterator[None]:
        # No connection is used twice: a server that closes an idle one at that moment would fail the request.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self.session:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        job = _Job(request, body, headers)
        try:
            if self.channels and _is_one_prompt(body):
                return await self._ask_both(job)
            await self._fetch_ticket(job)
            return await self._answer(job)
        except _Rejected as rejected:
            return rejected.response

    # ------------------------------------------------------------------------------------------------------ prefill

    async def _fetch_ticket(self, job: _Job) -> None:
        """Put a prefill engine's ticket into the job, None for no hand-over."""
        job.ticket = None
        for url in _in_turn(self.prefill) if _is_one_prompt(job.body) else ():
            # A prefill engine that is down costs time, not answers: the decode engine can compute the prompt itself.
            with suppress(_Refusal):
                job.ticket = await self._ask_prefill(job, url, prefill_request_params())
                break

    async def _ask_prefill(self, job: _Job, url: str, params: Mapping[str, object]) -> object:
        short = {k: v for k, v in job.body.items() if k not in {"stream_options", "min_tokens", "best_of"}}
        short |= {"stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": params}
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        try:
            async with self.session.post(
                url + job.request.path, json=short, headers=job.headers, timeout=_PREFILL_TIMEOUT
            ) as reply:
                if 400 <= reply.status < 500:
                    raise _Rejected(reply.status, await reply.read())
                reply.raise_for_status()
                answer = await reply.json()
        except _NO_ANSWER as error:
            raise _Refusal(error) from error
        if _is_aborted(answer):
            raise _Refusal("it drains")
        return answer.get("kv_transfer_params")

    async def _ask_both(self, job: _Job) -> web.StreamResponse:
        """Relay a decode engine's answer to a request that goes to a prefill engine at the same time."""
        url = _in_turn(self.prefill)[0]
        params = prefill_request_params((uuid.uuid4().hex, *self.channels[url]), secret=self.secret)
        job.ticket = {"do_remote_prefill": True, "do_remote_decode": False, "kv_stream": params["kv_stream"]}
        prefill = asyncio.create_task(self._prefill_beside(job, url, params))
        await asyncio.sleep(0)  # the prefill engine's request leaves first: both wait for its answer
        try:
            return await self._answer(job)
        finally:
            # It has ended, unless the decode engine needed it no more, or the client has left.
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    async def _prefill_beside(self, job: _Job, url: str, params: dict[str, Any]) -> None:
        """Let a prefill engine compute a prompt; else withdraw the hand-over, or the decode engine waits 30 s for it."""
        with suppress(_Refusal, _Rejected):  # the decode engine rejects the request as well
            await self._ask_prefill(job, url, params)
            return
        withdrawal = {**params, "kv_stream": {**params["kv_stream"], "withdraw": True}}
        body = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": withdrawal}
        body |= {key: job.body[key] for key in ("model",) if key in job.body}
        headers = {**job.headers, "X-Request-Id": uuid.uuid4().hex}
        with suppress(*_NO_ANSWER):
            async with self.session.post(url + _PATHS[0], json=body, headers=headers, timeout=_SHORT_TIMEOUT) as reply:
                await reply.read()

    # ------------------------------------------------------------------------------------------------------- decode

    async def _answer(self, job: _Job) -> web.StreamResponse:
        """Relay a decode engine's answer; offer the request to another engine while nothing has gone to the client."""
        reason, urls = "", _in_turn(self.decode)
        for attempt in range(_ATTEMPTS):
            # A second round over the same engines is worth a pause: one may be starting.
            await asyncio.sleep(_PAUSE_S * (attempt // len(urls)))
            url = urls[attempt % len(urls)]
            try:
                return await self._relay(job, url)
            except _Refusal as refusal:
                reason = f"{url}: {refusal}"
                # A ticket that two engines refuse is perhaps spent, or its lease is over.
                needs_another = refusal.has_seen_ticket or bool(attempt % 2)
                note(f"router: {reason}{ANOTHER_TICKET if needs_another else ''}")
                if needs_another:
                    await self._fetch_ticket(job)
        return _error(502, f"the decode engine did not answer: {reason}")

    async def _relay(self, job: _Job, url: str) -> web.StreamResponse:
        body = {**job.body, "kv_transfer_params": job.ticket}
        if job.ticket is None:
            del body["kv_transfer_params"]
        try:
            async with self.session.post(
                url + job.request.path, json=body, headers=job.headers, timeout=_DECODE_TIMEOUT
            ) as reply:
                if reply.status >= 500:
                    raise _Refusal(f"HTTP {reply.status}: {(await reply.text())[:200]}", has_seen_ticket=False)
                if reply.content_type == "text/event-stream":
                    return await _relay_stream(job.request, reply)
                data = await reply.read()
                answer: Any = await reply.json() if reply.content_type == "application/json" else {}
        except aiohttp.ClientConnectorError as error:
            raise _Refusal(error, has_seen_ticket=False) from error
        except _NO_ANSWER as error:
            raise _Refusal(error) from error
        if _is_aborted(answer):
            raise _Refusal("it drains", has_seen_ticket=any(choice.get("text") for choice in answer["choices"]))
        return web.Response(status=reply.status, body=data, content_type=reply.content_type)


def _in_turn(urls: deque[str]) -> list[str]:
    """Return all engines of a side in the order to ask them in; the next request begins with the next one."""
    order = list(urls)
    urls.rotate(-1)
    return order


async def _relay_stream(request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    """Relay events as they come, from the first that says something on; end a broken stream with an error event."""
    held = b""
    while (event := _first_said(held)) is None:
        chunk = await reply.content.readany()
        if not chunk:
            raise _Refusal("it ended its stream before it said anything")
        held += chunk
    if _is_aborted(event):
        raise _Refusal("it drains", has_seen_ticket=False)
    if "error" in event:
        raise _Refusal(str(event["error"])[:200], has_seen_ticket=False)
    response = web.StreamResponse(status=reply.status, headers={"Content-Type": "text/event-stream"})
    try:
        await response.prepare(request)
        while held:
            await response.write(held)
            held = await reply.content.readany()
        await response.write_eof()
    except ConnectionResetError:
        pass  # the client has left, which is no fault of the engine
    except _NO_ANSWER as error:
        message = f"the decode engine broke off: {str(error) or type(error).__name__}"
        # An event that was cut in its middle ends at the blank line; the body stays unfinished.
        await response.write(b"\n\ndata: " + json.dumps(_error_body(502, message)).encode() + b"\n\n")
        if request.transport is not None:
            request.transport.close()
    return response


def _first_said(held: bytes) -> dict[str, Any] | None:
    """Return the first event of a stream that says something: text, an end or an error; None until there is one.

    The first event of a chat names the role of the speaker and says nothing yet.
    """
    for line in held.split(b"\n")[:-1]:
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line[6:])
            if "choices" not in event or any(map(_has_content, event["choices"])):
                return event
    return None


def _has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("finish_reason") or choice.get("text") or any(delta[key] for key in delta if key != "role"))


def _is_aborted(answer: Any) -> bool:
    """Whether an engine gave a request up: vLLM answers so, with HTTP 200, while it drains."""
    return any(choice.get("finish_reason") == "abort" for choice in answer.get("choices", ()))


def _is_one_prompt(body: dict[str, Any]) -> bool:
    """Tell whether a body has one prompt: a text or one list of token ids, not a list of either."""
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or not prompt or len(prompt) == 1 or isinstance(prompt[0], int)


def _error(status: int, message: str) -> web.Response:
    return web.json_response(_error_body(status, message), status=status)


def _error_body(status: int, message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": "router_error", "code": status}}


def make_app(
    prefill: Sequence[str], decode: Sequence[str], channels: Sequence[tuple[str, int]] = (), secret: bytes | None = None
) -> web.Application:
    """Return the router as an aiohttp application in front of these engines (base URLs).

    With `channels`, the (host, port) of each prefill engine's side channel, both engines are asked at once by early tickets
    (docs/wire/ticket.md), which a secret of the fleet may cover.
    """
    router = _Router(prefill, decode, channels, secret)
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.cleanup_ctx.append(router.connections)
    app.add_routes([web.post(path, router.handle) for path in _PATHS])
    return app


def run_router(_uv: object, options: Namespace) -> int:
    """Serve until interrupted; return 1 if the port cannot be bound."""
    if options.concurrent and len(options.concurrent) != len(options.prefill):
        fail("give --concurrent HOST:PORT once for each --prefill")
    secret = options.secret_file.read_bytes().splitlines()[0].strip() if options.secret_file else None
    app = make_app(options.prefill, options.decode, options.concurrent, secret)
    about = f"router on http://{options.host}:{options.port}"
    try:
        web.run_app(
            app, host=options.host, port=options.port, shutdown_timeout=1, print=lambda _: print(about, flush=True)
        )
    except (OSError, OverflowError) as error:
        fail(f"cannot listen on {options.host}:{options.port}: {error}; choose another --port")
    return 0
