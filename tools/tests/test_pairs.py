"""The benchmark of engine pairs: figures by plain arithmetic, measurements on servers and processes that stand in for engines."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvdev.arguments import make_parser
from kvdev.benching import run_bench
from kvdev.early import EarlyTickets
from kvdev.pairs.asking import Answer, Stream, ask, ask_all, client, made_prompt, running_stream, text_of_event
from kvdev.pairs.engines import Fleet, Pair, processes_of, states_of
from kvdev.pairs.measures import gaps_beside_a_read, gaps_of, hand_over, prefill_rate, usual_of
from kvdev.paths import ROOT
from kvdev.steps import DevError

sys.path.insert(0, str(ROOT / "tools" / "bench"))
connector: Any = importlib.import_module("connector")
LONG = connector.Place("default", 112, 1900, "new")
HELD = LONG._replace(prefix="held")

# --------------------------------------------------------------------------------------------------------------- figures


def book_of(**samples: dict[str, list[float]]) -> Any:
    """Return a book of samples at `LONG`: measure (with _ for a space) -> kind -> samples."""
    book = connector.Book()
    for measure, kinds in samples.items():
        for kind, values in kinds.items():
            book.add(measure.replace("_", " ").replace("hand over", "hand-over"), kind, LONG, *values)
    return book


def row(book: Any, begin: str) -> dict[str, Any]:
    (found,) = [one for one in connector.rows_of(book) if one["name"].startswith(begin)]
    assert json.loads(json.dumps(found)) == found
    return found


def test_a_row_is_a_ratio_of_medians_with_quartiles_and_its_bound() -> None:
    book = book_of(hand_over={"ours": [30, 36, 33], "streamed": [17], "vllm": [60, 66, 90]})
    ours = row(book, "hand-over, ours beside vllm")
    assert (ours["ours"], ours["baseline"], ours["ratio"], ours["unit"], ours["samples"]) == (33, 66, 0.5, "ms", 3)
    assert ours["spread"] == [31.5, 34.5, 63, 78]
    assert (ours["target"], ours["met"]) == ("context", True)
    streamed = row(book, "hand-over, streamed beside ours, 1900 tokens, default transports, steps of 112")
    assert (streamed["ratio"], streamed["target"], streamed["met"]) == (0.515, "<= 0.5", False)


@pytest.mark.parametrize(("worst_ms", "met"), [(40, (True, True)), (45.6, (False, False)), (45.1, (False, True))])
def test_a_gap_is_judged_beside_vllms_own_and_the_usual_one(worst_ms: float, met: tuple[bool, bool]) -> None:
    book = book_of(worst_gap={"ours": [worst_ms], "vllm": [100]}, usual_gap={"ours": [35]})
    names = ("worst gap, ours beside vllm", "worst gap, ours beside usual gap")
    assert tuple(row(book, name)["met"] for name in names) == met
    beside_nothing = book_of(worst_gap={"ours": [40]}, usual_gap={"ours": [0]})
    assert not row(beside_nothing, "worst gap, ours beside usual gap")["met"]


def test_time_saved_is_beside_what_plain_takes_beyond_the_floor() -> None:
    book = book_of(
        first_token={"ours": [2150, 3000, 2000], "streamed": [2075, 2900, 1990]},
        hand_over={"ours": [180, 181, 190]},
        decode_step={"ours": [70]},
        last_read={"ours": [5]},
    )
    saved = row(book, "saved, streamed beside plain less floor")
    assert (saved["ours"], saved["baseline"], saved["ratio"]) == (75, 106, 0.708)
    assert (saved["target"], saved["met"], saved["samples"]) == (">= 0.6", True, 3)


def test_bounds_hold_where_they_are_said_to_and_unmeasured_ones_are_not_met() -> None:
    book = book_of(early_bytes={"streamed": [84]}, prefill_throughput={"ours": [960], "alone": [1000]})
    assert not row(book, "early bytes")["met"]
    assert row(book, "prefill throughput, ours beside alone")["target"] == ">= 0.95"
    book.add("first token", "ours", HELD, 400)
    book.add("first token", "streamed", HELD, 390)
    held = row(book, "first token, streamed beside ours, 1900 tokens, all but 108 held")
    assert (held["target"], held["met"]) == ("<= 0.95", False)
    missing = [one for one in connector.rows_of(book, needs_all=True) if "not measured" in one["name"]]
    assert len(missing) == len(connector.TARGETS) - 3
    assert not any(one["met"] for one in missing)


def test_one_wrong_answer_fails_the_run_and_vllms_own_may_recompute() -> None:
    book = book_of(wrong_answers={"vllm": [0, 0, 1], "ours": [0]}, recomputed={"vllm": [5], "ours": [1]})
    verdicts = {one["name"].rpartition(", 1900")[0]: one["met"] for one in connector.rows_of(book)}
    assert verdicts == {
        "wrong answers, vllm": False, "wrong answers, ours": True, "recomputed, vllm": True, "recomputed, ours": False
    }  # fmt: skip


def test_sizes_are_options_of_the_bench() -> None:
    assert make_parser().parse_args(["bench", "connector", "--gates", "--json"]).size == "gates"
    with pytest.raises(DevError, match="'topology' has one size: --gates is not for it"):
        run_bench("topology", as_json=False, size="gates")


# ------------------------------------------------------------------------------------------------------------- streams


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def asked(work: Callable[[str], Awaitable[Any]], handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """Return what a coroutine makes of a server's address."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_post("/v1/completions", handle)
        async with TestServer(app) as server:
            return await work(str(server.make_url("")).rstrip("/"))

    return asyncio.run(run())


def speaking(pause_s: float, *, share: float = 1) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler that streams a share of the tokens at a pace: a letter that the prompt's last token id gives."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        reply = web.StreamResponse(headers={"X-Prefill-Ms": "2"})
        reply.content_type = "text/event-stream"
        await reply.prepare(request)
        for _ in range(int(body["max_tokens"] * share)):
            await asyncio.sleep(pause_s)
            await reply.write(event(chr(60 + body["prompt"][-1] % 60)))
        return reply

    return handle


def pair_of(url: str) -> Pair:
    """Return a pair whose engines and router are one server."""
    engine: Any = SimpleNamespace(url=url, spec=SimpleNamespace(name="engine"), pid=os.getpid())
    return Pair(engine, engine, url)


def test_an_answer_has_its_times_and_one_that_is_short_or_refused_fails() -> None:
    (answer,) = asked(lambda url: ask_all(url, [[4]], tokens=3), speaking(0.02))
    assert (answer.text, len(answer.times_s)) == ("@@@", 3)
    assert answer.hand_over_ms == pytest.approx(answer.first_token_ms - 2)

    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=503, text="draining")

    for handler, words in ((speaking(0, share=0.5), "2 of 4 tokens"), (refuse, "HTTP 503: draining")):
        with pytest.raises(DevError, match=words):
            asked(lambda url: ask_all(url, [[4]], tokens=4), handler)
    with pytest.raises(DevError, match="broke off"):
        text_of_event(b'data: {"error": {"message": "gone"}}')


def test_the_worst_gap_is_that_of_the_read_less_what_a_step_for_two_takes() -> None:
    # 14 ms usually, 20 ms once while the prompt is read, then steps of 45 ms with two requests, the first of which takes 48 ms
    times = [9.986, 10.0, 10.014, 10.028, 10.048, 10.062, 10.110, 10.155, 10.200, 10.245]
    own = [10.1101, 10.1551, 10.2001, 10.2451]
    gaps = gaps_of(Stream(Answer(0.0, times)), Answer(10.0, own, "xxxx", prefill_ms=20))
    assert [gaps.usual, gaps.worst] == pytest.approx([14, 20])
    late = [*times[:6], *(each + 0.02 for each in times[6:])]
    gaps = gaps_of(Stream(Answer(0.0, late)), Answer(10.0, [each + 0.02 for each in own], "xxxx", prefill_ms=20))
    assert gaps.worst == pytest.approx(14 + 68 - 45)
    streamed = Stream(Answer(0.0, [9.9, 9.92, 9.94, 9.96, 9.98, 10.03, 10.05, 10.07, 10.09]))
    gaps = gaps_of(streamed, Answer(10.0, [10.0701], "x", prefill_ms=60), is_streamed=True)
    assert [gaps.usual, gaps.worst] == pytest.approx([20, 50])
    assert usual_of([0, 0, 0, 56] * 6) == 14  # tokens that come in bunches


def test_a_stream_goes_on_beside_and_one_that_ends_too_early_fails() -> None:
    async def work(url: str) -> Any:
        return await gaps_beside_a_read(pair_of(url), [5], [6])

    gaps = asked(work, speaking(0.004))
    assert (gaps.worst > 2, gaps.answer.text) == (True, "A" * 8)

    async def too_short(url: str) -> None:
        async with client() as session, running_stream(session, url, [4], tokens=30):
            await ask(session, url, [5], tokens=40)

    with pytest.raises(DevError, match="ended after 30 tokens"):
        asked(too_short, speaking(0.002))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prefill_rate_reads_what_was_computed(is_streamed: bool) -> None:
    given: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        given.append((await request.json())["kv_transfer_params"])
        return web.json_response({"kv_transfer_params": {"do_remote_decode": False, "number": len(given)}})

    async def work(url: str) -> float:
        early = EarlyTickets([url], [("127.0.0.1", 5600)]) if is_streamed else None
        pair = replace(pair_of(url), early=early)
        return await prefill_rate(pair.prefill, pair, [made_prompt(f"{number}", 100) for number in range(3)])

    assert asked(work, handle) > 0
    to_prefill = [params for params in given if params["do_remote_decode"]]
    to_decode = [params for params in given if not params["do_remote_decode"]]
    assert len(to_prefill) == len(to_decode) == 3
    if is_streamed:
        assert {p["kv_stream"]["id"] for p in to_prefill} == {p["kv_stream"]["id"] for p in to_decode}


def test_a_hand_over_without_an_answer_of_the_prefill_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answered(_url: str, prompts: list[list[int]]) -> list[Answer]:
        return [Answer(0.0, [1.0, 2.0], "xx", prefill_ms=prompt[0]) for prompt in prompts]

    monkeypatch.setattr("kvdev.pairs.measures.ask_all", answered)
    assert hand_over(pair_of(""), [1]).text == "xx"
    with pytest.raises(DevError, match="engine did not answer"):
        hand_over(pair_of(""), [0])


# --------------------------------------------------------------------------------------------------------------- turns

FAMILY = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); print(flush=True); time.sleep(60)"
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


class Group:
    """A process and its child in a group of their own."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", FAMILY, *SLEEPER]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self.pid = self.process.pid
        self.process.stdout.readline()

    def signal_all(self, number: int) -> None:
        os.killpg(self.pid, number)


@pytest.fixture
def fleet() -> Iterator[Any]:
    made: Any = Fleet()
    made.groups = {name: [Group()] for name in "abc"}
    yield made
    for (group,) in made.groups.values():
        group.signal_all(signal.SIGKILL)
        group.process.wait()
        group.process.stdout.close()


def test_one_group_goes_on_and_every_process_of_the_others_stands_still(fleet: Any) -> None:
    for chosen in "bacc":
        fleet.only(chosen)
        for name, (group,) in fleet.groups.items():
            states = states_of(group.pid)
            assert len(states) == len(processes_of(group.pid)) == 2
            assert ("T" in states) is (name != chosen)
    fleet.resume()
    assert not any("T" in states_of(group.pid) for (group,) in fleet.groups.values())
