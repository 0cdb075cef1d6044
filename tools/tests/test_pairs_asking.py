"""Streams of answers and what is measured with them, against servers that stand in for engines."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import BaseTestServer, TestServer

from kvdev.early import EarlyTickets
from kvdev.pairs.asking import (
    Answer,
    Stream,
    ask,
    ask_all,
    client,
    made_prompt,
    running_stream,
    text_of_event,
)
from kvdev.pairs.fleet import Pair
from kvdev.pairs.measures import (
    Counts,
    counts_of,
    early_share,
    gaps_beside_a_read,
    gaps_of,
    hand_over,
    last_read_ms,
    prefill_rate,
    usual_of,
    wait_idle,
)
from kvdev.router import make_app
from kvdev.steps import DevError


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def test_text_of_the_lines_of_a_stream() -> None:
    lines = [
        event("ab").strip(),
        b"\n",
        b"data: [DONE]\n",
        b": a comment\n",
        event("").strip(),
        b'data: {"choices": []}',
    ]
    assert [text_of_event(line) for line in lines] == ["ab", "", "", "", "", ""]
    with pytest.raises(DevError, match="broke off"):
        text_of_event(b'data: {"error": {"message": "gone"}}')


def test_prompts_are_the_same_for_a_seed_and_share_nothing_with_another() -> None:
    assert made_prompt("a", 300) == made_prompt("a", 300)
    assert len(made_prompt("a", 300)) == 300
    assert made_prompt("a", 128) != made_prompt("b", 128)
    assert set(made_prompt("a", 3000)) == set(range(4, 98))


def asked(
    work: Callable[[str], Awaitable[Any]],
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> Any:
    """Return what a coroutine makes of a server's address."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_post("/v1/completions", handle)
        async with TestServer(app) as server:
            return await work(str(server.make_url("")).rstrip("/"))

    return asyncio.run(run())


def speaking(
    pause_s: float, *, prefill_ms: str = "", broken: bool = False
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler that streams a token every so often: the first letter of the prompt's last token id."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        reply = web.StreamResponse(headers={"X-Prefill-Ms": prefill_ms} if prefill_ms else {})
        reply.content_type = "text/event-stream"
        await asyncio.sleep(pause_s)
        await reply.prepare(request)
        for _ in range(body["max_tokens"] // (2 if broken else 1)):
            await reply.write(event(chr(60 + body["prompt"][-1] % 60)))
            await asyncio.sleep(pause_s)
        await reply.write(b"data: [DONE]\n\n")
        return reply

    return handle


def test_an_answer_has_its_times_and_the_routers_word_on_prefill() -> None:
    answers = asked(lambda url: ask_all(url, [[4], [5]], tokens=3), speaking(0.05, prefill_ms="20.5"))
    assert [answer.text for answer in answers] == ["@@@", "AAA"]
    for answer in answers:
        assert len(answer.times_s) == 3
        assert 50 <= answer.first_token_ms < 500
        assert answer.hand_over_ms == pytest.approx(answer.first_token_ms - 20.5)
        assert answer.prefilled_s == pytest.approx(answer.began_s + 0.0205)
        assert answer.times_s[2] - answer.times_s[0] >= 0.09


def test_an_answer_that_is_too_short_or_an_error_fails() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=503, text="draining")

    for handler, words in ((speaking(0, broken=True), "2 of 4 tokens"), (refuse, "HTTP 503: draining")):
        with pytest.raises(DevError, match=words):
            asked(lambda url: ask_all(url, [[4]], tokens=4), handler)


def test_gaps_are_those_that_a_span_of_time_touches() -> None:
    stream = Stream(Answer(0.0, [1, 2, 5, 6]))
    assert stream.gaps_ms(3, 4) == [3000]
    assert stream.gaps_ms(1, 2) == [1000]
    assert stream.gaps_ms(1.5, 5.5) == [1000, 3000, 1000]
    assert stream.gaps_ms(7, 8) == []


def test_the_worst_gap_is_that_of_the_read_and_the_usual_one_that_of_the_prefill_before() -> None:
    stream = Stream(Answer(0.0, [10.0, 10.02, 10.04, 10.06, 10.20, 10.22, 10.9]))
    answer = Answer(10.0, [10.21], "x", prefill_ms=60)
    gaps = gaps_of(stream, answer)
    assert gaps.worst == pytest.approx(140)
    assert gaps.usual == pytest.approx(20)
    with pytest.raises(DevError, match="no tokens during"):
        gaps_of(Stream(Answer(0.0, [1, 2])), answer)


def test_the_step_of_the_first_token_is_compared_with_those_after_it() -> None:
    # 14 ms usually, 20 ms once while the prompt is read, then steps of 45 ms with two requests, the first of which takes 48 ms
    times = [9.986, 10.0, 10.014, 10.028, 10.048, 10.062, 10.110, 10.155, 10.200, 10.245]
    own = [10.1101, 10.1551, 10.2001, 10.2451]
    gaps = gaps_of(Stream(Answer(0.0, times)), Answer(10.0, own, "xxxx", prefill_ms=20))
    assert [gaps.usual, gaps.worst] == pytest.approx([14, 20])
    slow = [*times[:6], *(each + 0.02 for each in times[6:7]), *(each + 0.02 for each in times[7:])]
    late = gaps_of(Stream(Answer(0.0, slow)), Answer(10.0, [each + 0.02 for each in own], "xxxx", prefill_ms=20))
    assert late.worst == pytest.approx(14 + 68 - 45)


def test_tokens_that_come_in_bunches_have_the_gaps_of_their_steps() -> None:
    assert usual_of([0, 0, 0, 56] * 6) == 14
    assert usual_of([14] * 20 + [300] + [14] * 20) == 14
    assert usual_of([10, 20]) == 15


def test_a_streamed_prompt_is_read_from_the_request_on() -> None:
    stream = Stream(Answer(0.0, [9.9, 9.92, 9.94, 9.96, 9.98, 10.03, 10.05, 10.07, 10.09]))
    answer = Answer(10.0, [10.0701], "x", prefill_ms=60)
    assert gaps_of(stream, answer).worst == pytest.approx(20)
    streamed = gaps_of(stream, answer, is_streamed=True)
    assert [streamed.usual, streamed.worst] == pytest.approx([20, 50])


def pair_of(url: str) -> Pair:
    """Return a pair whose engines and router are one server."""
    engine: Any = SimpleNamespace(url=url, spec=SimpleNamespace(name="engine"), pid=os.getpid())
    return Pair(engine, engine, url)


def test_a_stream_goes_on_beside_and_is_given_up() -> None:
    async def work(url: str) -> tuple[int, Any]:
        async with client() as session, running_stream(session, url, [4], tokens=1000) as stream:
            before = len(stream.answer.times_s)
            gaps = await gaps_beside_a_read(pair_of(url), [5], [6])
        return before, gaps

    before, gaps = asked(work, speaking(0.004, prefill_ms="2"))
    assert before >= 24
    assert gaps.worst > 2
    assert gaps.answer.text == "A" * 8


def test_a_stream_that_ends_too_early_fails() -> None:
    async def work(url: str) -> None:
        async with client() as session, running_stream(session, url, [4], tokens=30):
            await ask(session, url, [5], tokens=40)

    with pytest.raises(DevError, match="ended after 30 tokens"):
        asked(work, speaking(0.002))


def test_a_prefill_rate_reads_the_tickets_of_the_prompts() -> None:
    asked_for: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        asked_for.append(body)
        await asyncio.sleep(0.05)
        return web.json_response({"kv_transfer_params": {"ticket": body["prompt"][:3]}})

    async def run(url: str) -> tuple[float, float]:
        pair = pair_of(url)
        prompts = [made_prompt(f"{number}", 100) for number in range(4)]
        return await prefill_rate(pair.prefill, pair, prompts), await prefill_rate(pair.prefill, None, prompts)

    with_reader, without = asked(run, handle)
    assert 800 < with_reader < 8000  # 400 tokens in 50 ms and more
    assert 800 < without < 8000
    assert all(body["kv_transfer_params"]["do_remote_decode"] for body in asked_for[:4])
    tickets = [body["kv_transfer_params"]["ticket"] for body in asked_for[4:8]]
    assert tickets == [body["prompt"][:3] for body in asked_for[4:8]]
    assert all("kv_transfer_params" not in body for body in asked_for[8:])


def test_a_streamed_prefill_rate_asks_both_engines_at_once() -> None:
    asked_for: list[dict[str, Any]] = []
    all_there = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        asked_for.append((await request.json())["kv_transfer_params"])
        if len(asked_for) == 6:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), 10)
        return web.json_response({})

    async def run(url: str) -> float:
        pair = replace(pair_of(url), early=EarlyTickets([url], [("127.0.0.1", 5600)]))
        return await prefill_rate(pair.prefill, pair, [made_prompt(f"{number}", 100) for number in range(3)])

    assert asked(run, handle) > 0
    ids = [
        {params["kv_stream"]["id"] for params in asked_for if params[role]}
        for role in ("do_remote_decode", "do_remote_prefill")
    ]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 3


# ------------------------------------------------------------------------------------------------------- both at once


def test_a_router_that_asks_both_tells_at_the_end_when_prefill_answered() -> None:
    async def run() -> tuple[list[Answer], Answer]:
        decode = await _served(speaking(0.05))
        prefill = await _served(gives_ticket_after(0.1))
        slow = await _served(gives_ticket_after(60))
        async with decode, prefill, slow:
            early = EarlyTickets([_url(prefill)], [("127.0.0.1", 5600)])
            async with TestServer(make_app([_url(prefill)], [_url(decode)], early)) as router:
                answers = await ask_all(_url(router), [[4], [5]], tokens=3)
            early = EarlyTickets([_url(slow)], [("127.0.0.1", 5600)])
            async with TestServer(make_app([_url(slow)], [_url(decode)], early)) as router:
                return answers, (await ask_all(_url(router), [[4]], tokens=3))[0]

    answers, unfinished = asyncio.run(run())
    for answer in answers:
        assert 100 <= answer.prefill_ms < 5000
        assert answer.text in {"@@@", "AAA"}
    assert unfinished.prefill_ms == 0
    assert unfinished.text == "@@@"


def test_a_hand_over_without_an_answer_of_the_prefill_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answered(_url: str, prompts: list[list[int]]) -> list[Answer]:
        return [Answer(0.0, [1.0, 2.0], "xx", prefill_ms=prompt[0]) for prompt in prompts]

    monkeypatch.setattr("kvdev.pairs.measures.ask_all", answered)
    assert hand_over(pair_of(""), [1]).text == "xx"
    with pytest.raises(DevError, match="engine did not answer"):
        hand_over(pair_of(""), [0])
    # Of a pair that reads meanwhile the prefill engine may answer after the last token.
    early = EarlyTickets(["http://p"], [("127.0.0.1", 5600)])
    assert hand_over(replace(pair_of(""), early=early), [0]).prefill_ms == 0


def _url(server: BaseTestServer) -> str:
    return str(server.make_url("")).rstrip("/")


async def _served(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> TestServer:
    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    return TestServer(app)


def gives_ticket_after(seconds: float) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler of a prefill engine that takes so long."""

    async def handle(request: web.Request) -> web.Response:
        until = time.monotonic() + seconds
        while time.monotonic() < until and request.transport is not None:  # the router may let go of it
            await asyncio.sleep(0.005)
        return web.json_response({"choices": [], "kv_transfer_params": {}})

    return handle


# ------------------------------------------------------------------------------------------------------------ counters

PAGE = """# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 7
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 1900
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_count{engine="0"} 3
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.25
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 0
"""
STREAMED = """# TYPE vllm:kv_transfer_stream_bytes histogram
vllm:kv_transfer_stream_bytes_count{engine="0"} 2
vllm:kv_transfer_stream_bytes_sum{engine="0"} 1000
# TYPE vllm:kv_transfer_stream_early_bytes histogram
vllm:kv_transfer_stream_early_bytes_count{engine="0"} 2
vllm:kv_transfer_stream_early_bytes_sum{engine="0"} 900
"""


def engine_with(*pages: str) -> Any:
    """Return an engine that answers with these pages, one after the other."""
    left = iter(pages)
    return SimpleNamespace(metrics=lambda: next(left), spec=SimpleNamespace(name="engine"), url="")


def test_counters_of_an_engine_that_streams_and_of_one_that_does_not() -> None:
    plain, streamed = (counts_of(engine_with(page.replace("{running}", "0"))) for page in (PAGE, PAGE + STREAMED))
    assert plain == Counts(7, 0, 0, 3, 250)
    assert streamed == Counts(7, 1000, 900, 3, 250)


def test_bytes_that_were_not_streamed_are_late() -> None:
    token = 131_072
    before = Counts(0, 10 * token, 9 * token, 0, 0)
    assert early_share(before, Counts(0, 12 * token, 10.5 * token, 0, 0), 2) == 75
    assert early_share(before, Counts(0, 11 * token, 9.75 * token, 0, 0), 2) == 37.5
    assert early_share(before, before, 2) == 0
    # whole blocks are more than the prompt's tokens
    assert early_share(before, Counts(0, 14 * token, 12 * token, 0, 0), 3) == 75


def test_the_time_of_a_read_is_that_of_the_reads_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdev.pairs.measures.hand_over", lambda _pair, _prompt: None)
    later = PAGE.replace('_count{engine="0"} 3', '_count{engine="0"} 5').replace("0.25", "0.26")
    engine = engine_with(PAGE.replace("{running}", "0"), later.replace("{running}", "0"))
    assert last_read_ms(Pair(engine, engine, ""), [4]) == pytest.approx(5)
    still = engine_with(*[PAGE.replace("{running}", "0")] * 2)
    with pytest.raises(DevError, match="counts no read"):
        last_read_ms(Pair(still, still, ""), [4])


def test_an_engine_is_idle_when_it_has_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, idle = (PAGE.replace("{running}", number) for number in ("1", "0"))
    engine = engine_with(busy, busy, idle)
    wait_idle(engine)
    with pytest.raises(StopIteration):
        engine.metrics()
    monkeypatch.setattr("kvdev.pairs.measures._IDLE_WITHIN_S", 0)
    with pytest.raises(DevError, match="engine is busy"):
        wait_idle(engine_with(*[busy] * 9))
