"""Every benchmark runs to its end, tiny, and gives rows that `dev.py bench` can show; `connector` on engines that stand in."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvdev.paths import ROOT

FOLDER = ROOT / "tools" / "bench"
TINY: dict[str, dict[str, Any]] = {
    "hand_over": {
        "IN_FLIGHT": (2,),
        "ROUNDS": 2,
        "SHIPPED_ROUNDS": 1,
        "BLOCKS": (1,),
        "AT_ONCE": (2,),
        "LIVE": 9,
        "REST_S": 0.1,
    },
    "handshake": {"QUERIES": 50, "ROUNDS": 2},
}


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def test_every_benchmark_is_tried() -> None:
    assert {file.stem for file in FOLDER.glob("[!_]*.py")} == {*TINY, "connector"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in {"hand_over", "handshake"} else ()) for name in TINY]
)
def test_a_benchmark_runs_to_its_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(name, monkeypatch)
    for constant, value in TINY[name].items():
        monkeypatch.setattr(module, constant, value)
    rows = list(module.run())
    assert rows
    for row in rows:
        assert row.keys() >= {"name", "unit", "ours", "baseline", "ratio", "target", "met"}


def test_phases_quantiles_and_gaps_of_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over = module_of("hand_over", monkeypatch)
    of_a = [
        ("queued", "a", 1.0),
        ("order", "a", 1.001),
        ("result", "a", 1.012),
        ("freed", "a", 1.02),
        ("token", "a", 1.015),
    ]
    # Of the transfers one is older than the order; data and fence word end after 6 and 10 ms; a second token does not count.
    nixl = [("post", "", 0.9), ("done", "", 0.95), ("post", "", 1.003), ("done", "", 1.006), ("post", "", 1.007)]
    alone = [*nixl, ("done", "", 1.01), *of_a, ("token", "a", 1.5)]
    for first, last, span in (("order", "posted", 2), ("posted", "data there", 3), ("data there", "fence held", 4)):
        assert hand_over.spans_ms([alone], first, last) == pytest.approx([span])
    assert hand_over.spans_ms([alone, alone], "result", "freed") == pytest.approx([8, 8])
    two = [*of_a, ("queued", "b", 0.999), ("token", "b", 1.03)]
    assert hand_over.spans_ms([two], "queued", "token") == pytest.approx([31]), (
        "from the first queued to the last token"
    )
    beside = [("token", "beside1", at) for at in (0.98, 0.99, 1.004, 1.009)]
    assert hand_over.gaps_ms([[*alone, *beside]] * 2) == pytest.approx([14, 14])
    assert hand_over.steps_ms([[("step", "", cpu_s) for cpu_s in (9, 0.001, 0.002, 9)]]) == pytest.approx([1, 2])
    assert [hand_over.quantile([3, 1, 2], share) for share in (0.5, 0.9, 1.0)] == pytest.approx([2, 2.8, 3])


# ----------------------------------------------------------------------------------------------------------- connector


class StandIn:
    """An engine without a process, whose counters grow with each look at them."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.spec, self.side_channel_port, self.pid = url, SimpleNamespace(name=name), 5600, 0
        self.looks, self.is_going = 0, True

    def signal_all(self, number: int) -> None:
        self.is_going = number == 18

    def metrics(self) -> str:
        self.looks += 1
        return f"vllm:nixl_xfer_time_seconds_sum {self.looks}\nvllm:nixl_xfer_time_seconds_count {self.looks}\n"


async def complete(request: web.Request) -> web.StreamResponse:
    """Give a ticket, or stream a letter that the prompt's last token id gives; `/wrong` has another one."""
    body = await request.json()
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": {"do_remote_prefill": True}})
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    letter = "?" if request.path.startswith("/wrong") else chr(60 + body["prompt"][-1] % 60)
    for _ in range(body["max_tokens"]):
        await asyncio.sleep(0.001)
        await reply.write(f"data: {json.dumps({'choices': [{'text': letter}]})}\n\n".encode())
    return reply


def test_the_benchmark_of_connectors_measures_every_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connector = module_of("connector", monkeypatch)
    samples = defaultdict[Any, list[float]](list)

    async def at_rest(engines: list[StandIn]) -> list[float]:
        assert all(engine.is_going for engine in engines)
        return [2.0] * len(engines)

    async def run() -> dict[str, list[StandIn]]:
        app = web.Application()
        app.add_routes([web.post(f"{part}/v1/completions", complete) for part in ("", "/wrong")])
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            fleet = {kind: [StandIn(url, f"{kind}-0"), StandIn(url, f"{kind}-1")] for kind in connector.KINDS}
            fleet["vllm"][1].url += "/wrong"
            fleet["alone"] = [StandIn(url, "alone-0")]
            plan = connector.Plan([], [], ["new", "held"], rounds=2, pair_rounds=1, engine_rounds=1)
            place = connector.Place("default", 112)
            await connector._Setting(plan, place, fleet, samples).measure()
        return fleet

    monkeypatch.setattr(connector, "rest_shares", at_rest)
    fleet = asyncio.run(run())
    assert [name for name, engines in fleet.items() if engines[0].is_going] == ["alone"]
    rows = {row["name"]: row for row in connector.rows_of(samples, needs_all=True)}
    assert json.loads(json.dumps(rows)) == rows
    unmeasured = [name for name, row in rows.items() if "not measured" in name and not row["met"]]
    assert unmeasured == ["hand-over, streamed beside ours: not measured"], "the bound over TCP"
    place = "1900 tokens, default transports, steps of 112"
    early = rows[f"early bytes, streamed beside all bytes, {place}"]
    assert (early["target"], early["met"], early["samples"]) == (">= 0.85", False, 3)
    assert rows[f"worker at rest, ours beside vllm, {place}"]["ratio"] == 1
    wrong = {kind: rows[f"wrong answers, {kind}, {place}"] for kind in connector.KINDS}
    assert [(row["ours"], row["met"]) for row in wrong.values()] == [(0, True), (0, True), (3, False)]
    assert capsys.readouterr().err.count("a wrong answer: vllm") == 5, "the same, and with all but the end held"


def test_the_worst_gap_is_that_of_the_read_less_what_a_step_for_two_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = module_of("connector", monkeypatch)
    # 14 ms usually, 20 ms once while the prompt is read, then steps of 45 ms with two requests, the first of which takes 48 ms
    times = [9.986, 10.0, 10.014, 10.028, 10.048, 10.062, 10.110, 10.155, 10.200, 10.245]
    own = [10.1101, 10.1551, 10.2001, 10.2451]
    stream, answer = connector.Answer(0, 0, times), connector.Answer(10.0, 10.02, own)
    assert connector.gaps_of(stream, answer) == pytest.approx((20, 14))
    stream = connector.Answer(0, 0, [9.9, 9.92, 9.94, 9.96, 9.98, 10.03, 10.05, 10.07, 10.09])
    answer = connector.Answer(10.0, 10.06, [10.0701])
    assert connector.gaps_of(stream, answer, is_streamed=True) == pytest.approx((50, 20))
