"""The router between stand-in engines, one after the other and both at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import RawTestServer, TestClient, TestServer

from kvdev.cli import make_parser
from kvdev.router import make_app

TICKET = {"do_remote_prefill": True, "remote_engine_id": "P", "remote_block_ids": [[1, 2]]}
SECRET = b"a fleet secret, 16+"
Handler = Callable[[Any], Awaitable[web.StreamResponse]]


class StandIn:
    """An engine that remembers what it was asked; None: one that is not there."""

    def __init__(self, answer: Handler | None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self._answer = answer
        self.server = RawTestServer(self._handle)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(request.headers.get("X-Request-Id", ""))
        assert self._answer is not None
        return await self._answer(request)

    async def started(self) -> str:
        if self._answer is None:
            return "http://127.0.0.1:1"
        await self.server.start_server()
        return str(self.server.make_url("")).rstrip("/")


class Fleet:
    """Stand-ins and a router in front of them, which asks both at once `if is_concurrent`."""

    def __init__(
        self, prefill: Sequence[Handler | None], decode: Sequence[Handler | None], *, is_concurrent: bool = False
    ) -> None:
        self.prefill, self.decode = [StandIn(one) for one in prefill], [StandIn(one) for one in decode]
        self._channels = [("127.0.0.1", 5600)] if is_concurrent else []

    async def __aenter__(self) -> TestClient[Any, Any]:
        prefill, decode = [[await engine.started() for engine in side] for side in (self.prefill, self.decode)]
        self.client = TestClient(
            TestServer(make_app(prefill, decode, self._channels, SECRET if self._channels else None))
        )
        await self.client.start_server()
        return self.client

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for engine in (*self.prefill, *self.decode):
            await engine.server.close()

    @property
    def tickets(self) -> list[Any]:
        """Tickets that reached a decode engine."""
        return [body.get("kv_transfer_params") for engine in self.decode for body in engine.asked]

    @property
    def prefills(self) -> int:
        return sum(len(engine.asked) for engine in self.prefill)


def send(fleet: Fleet, body: Any, path: str = "/v1/completions", times: int = 1) -> list[tuple[int, str]]:
    """Send a body through a fleet's router so often; return status and text of the answers."""

    async def run() -> list[tuple[int, str]]:
        async with fleet as client:
            replies = [await client.post(path, data=json.dumps(body)) for _ in range(times)]
            return [(reply.status, await reply.text()) for reply in replies]

    return asyncio.run(asyncio.wait_for(run(), 120))


def answers(body: dict[str, Any], status: int = 200) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handle


def streams(*events: dict[str, Any], is_cut: bool = False) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if is_cut and request.transport is not None:
            request.transport.abort()
        return response

    return handle


def said(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish_reason}]}


HELLO = said("hello")
gives_ticket = answers({"choices": [{"text": "x"}], "kv_transfer_params": TICKET})
gives_text = answers(HELLO)
speaks = streams(said("1"), said("2"))
SPOKEN = "".join(f"data: {json.dumps(said(text))}\n\n" for text in "12")
refuses = answers({"error": "too long"}, 400)
drains = answers(said("", "abort"))  # as vLLM does between SIGTERM and its end
fails = answers({"error": {"message": "KV load failure"}}, 500)
dies = streams(is_cut=True)
drains_in_a_stream = streams({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, said("", "abort"))
fails_in_a_stream = streams({"error": {"message": "Internal server error", "code": 500}})


def test_the_ticket_goes_from_prefill_to_decode_and_the_body_stays() -> None:
    body = {"prompt": "p", "max_tokens": 9, "stream_options": {}, "min_tokens": 3, "n": 4, "best_of": 4}
    fleet = Fleet([gives_ticket], [gives_text])
    assert send(fleet, {**body, "kv_transfer_params": {"evil": 1}}) == [(200, json.dumps(HELLO))]
    (asked,) = fleet.prefill[0].asked
    assert (asked["max_tokens"], asked["stream"], asked["n"]) == (1, False, 1)
    assert asked["kv_transfer_params"]["do_remote_decode"]
    assert not asked.keys() & {"stream_options", "min_tokens", "best_of"}
    assert "evil" not in asked["kv_transfer_params"]
    assert fleet.decode[0].asked == [{**body, "kv_transfer_params": TICKET}]
    assert fleet.prefill[0].headers == fleet.decode[0].headers != [""]


@pytest.mark.parametrize("prompt", [["p", "q"], [[1, 2], [3]], [1, 2], ["p"], [[1, 2]]])
def test_a_body_with_several_prompts_is_not_handed_over(prompt: list[Any]) -> None:
    is_one = prompt in ([1, 2], ["p"], [[1, 2]])
    for is_concurrent in (False, True):
        fleet = Fleet([gives_ticket], [gives_text], is_concurrent=is_concurrent)
        send(fleet, {"prompt": prompt})
        assert (fleet.prefills, fleet.tickets == [None]) == (is_one, not is_one)


def test_a_wrong_request_is_refused_by_the_engine_that_finds_it() -> None:
    fleet = Fleet([refuses], [gives_text])
    assert send(fleet, {"prompt": "p"}) == [(400, '{"error": "too long"}')]
    assert fleet.tickets == []
    assert send(Fleet([refuses], [gives_text]), ["no object"])[0][0] == 400
    assert send(Fleet([refuses], [refuses], is_concurrent=True), {"prompt": "p"}) == [(400, '{"error": "too long"}')]


@pytest.mark.parametrize("prefill", [None, gives_text, fails, drains, dies])
def test_without_a_ticket_the_decode_engine_computes_the_prompt(prefill: Handler | None) -> None:
    fleet = Fleet([prefill], [gives_text])
    assert send(fleet, {"prompt": "p"}) == [(200, json.dumps(HELLO))]
    assert fleet.tickets == [None]
    fleet = Fleet([prefill, gives_ticket], [gives_text])
    send(fleet, {"prompt": "p"}, times=2)
    assert prefill is gives_text or fleet.tickets == [TICKET] * 2


@pytest.mark.parametrize("decode", [None, drains])
def test_a_request_that_all_decode_engines_refuse_is_a_502_that_says_why(decode: Handler | None) -> None:
    ((status, text),) = send(Fleet([gives_ticket], [decode, decode]), {"prompt": "p"})
    assert (status, "did not answer: http" in text, "it drains" in text) == (502, True, decode is drains)


@pytest.mark.parametrize(("gone", "prefills"), [(None, 1), (drains, 1), (fails, 1), (dies, 2)])
def test_a_decode_engine_that_refuses_is_replaced_by_the_other(gone: Handler | None, prefills: int) -> None:
    """A ticket that the engine cannot have used goes to the next one; else the prompt is handed over anew."""
    fleet = Fleet([gives_ticket, gives_ticket], [gone, gives_text])
    assert send(fleet, {"prompt": "p"}) == [(200, json.dumps(HELLO))]
    assert (fleet.prefills, fleet.tickets[-1]) == (prefills, TICKET)
    fleet = Fleet([gives_ticket], [gone, gives_text], is_concurrent=True)
    assert send(fleet, {"prompt": "p"}) == [(200, json.dumps(HELLO))]
    assert ("kv_stream" in fleet.tickets[-1]) is (prefills == 1)


def test_a_ticket_that_two_engines_refuse_is_replaced() -> None:
    fleet = Fleet([gives_ticket], [fails, fails, gives_text])
    assert send(fleet, {"prompt": "p"})[0][0] == 200
    assert (fleet.prefills, fleet.tickets) == (2, [TICKET] * 3)


@pytest.mark.parametrize("gone", [drains_in_a_stream, fails_in_a_stream, dies])
def test_a_stream_of_which_the_client_saw_nothing_begins_again_elsewhere(gone: Handler) -> None:
    fleet = Fleet([gives_ticket], [gone, speaks])
    got = send(fleet, {"prompt": "p", "stream": True}, "/v1/chat/completions", times=2)
    assert got == [(200, SPOKEN)] * 2


def test_an_answer_that_breaks_ends_the_connection_and_the_stream_with_an_error_event() -> None:
    seen: list[bytes] = []

    async def run() -> None:
        async with Fleet([gives_ticket], [streams(said("1"), is_cut=True)]) as client:
            reply = await client.post("/v1/completions", json={"prompt": "p", "stream": True})
            async for line in reply.content:
                seen.append(line.strip())  # noqa: PERF401  (those before the end of the connection are kept)

    with pytest.raises(ClientError):
        asyncio.run(asyncio.wait_for(run(), timeout=120))
    error = json.loads([line for line in seen if line][-1].removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == (502, "router_error")


# -------------------------------------------------------------------------------------------------- both at once


def test_both_engines_get_the_request_with_one_early_ticket_that_engines_of_the_fleet_accept() -> None:
    from kv_scheduler_state.hosts import HostPolicy
    from kv_scheduler_state.ticket.early import read_early
    from kv_scheduler_state.ticket.seal import TicketSeal

    body = {"prompt": "p", "max_tokens": 9, "min_tokens": 3}
    fleet = Fleet([gives_ticket], [gives_text], is_concurrent=True)
    send(fleet, body, times=2)
    asked, answered = fleet.prefill[0].asked[0], fleet.decode[0].asked[0]
    to_prefill, to_decode = asked["kv_transfer_params"], answered["kv_transfer_params"]
    assert to_prefill["kv_stream"] == to_decode["kv_stream"] != fleet.tickets[1]["kv_stream"]
    assert (to_prefill["do_remote_decode"], to_decode["do_remote_prefill"]) == (True, True)
    assert (asked["max_tokens"], "min_tokens" in asked, "remote_block_ids" in to_decode) == (1, False, False)
    assert {**answered, "kv_transfer_params": None} == {**body, "kv_transfer_params": None}
    read = read_early(to_decode, HostPolicy(), TicketSeal((SECRET,)))
    assert (read.host, read.port) == ("127.0.0.1", 5600)


@pytest.mark.parametrize("gone", [refuses, fails, drains, dies])
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

    fleet = Fleet([fails_and_notes], [waits_for_the_prompt], is_concurrent=True)
    assert send(fleet, {"model": "m", "prompt": "p"})[0][0] == 200
    first, second = fleet.prefill[0].asked
    stream = fleet.tickets[0]["kv_stream"]
    assert second["kv_transfer_params"] == {**first["kv_transfer_params"], "kv_stream": {**stream, "withdraw": True}}
    assert (second["model"], second["prompt"], second["max_tokens"]) == ("m", [0], 1)
    assert len(set(fleet.prefill[0].headers)) == 2, "engines tell requests apart by this id"


@pytest.mark.parametrize(
    "words",
    [
        *(["--prefill", url] for url in ("foo", "127.0.0.1:8000", "http://", "http://host:port", "ftp://host")),
        *(["--concurrent", channel] for channel in ("5600", "h:0", "h:x", ":1")),
    ],
)
def test_an_invalid_address_is_refused_at_the_start(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ends = ["router", "--prefill", "http://a:1", "--decode", "http://b"]
    parsed = make_parser().parse_args([*ends, "--concurrent", "[::1]:5600"])
    assert (parsed.prefill, parsed.concurrent) == (["http://a:1"], [("::1", 5600)])
    with pytest.raises(SystemExit):
        make_parser().parse_args([*ends, *words])
    assert words[1] in capsys.readouterr().err
