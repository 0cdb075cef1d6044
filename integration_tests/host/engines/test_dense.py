"""A dense model: hand-overs, prefix hits, aborts, hostile tickets, on one pair of real engines."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from statistics import median

import aiohttp
import pytest
from commands import adapter, parts, time_to_first_token
from fleets import (
    COMPUTED,
    FAILED,
    FAILED_READS,
    OWN_WORKERS,
    TRANSFERS,
    Fleet,
    log_lines,
    prompt,
    quoted_lines,
    started_pair,
)

from kvdev.dashboards import panel_expressions, samples_read
from kvdev.demo import openai_client
from kvdev.engines import families_of, samples_of

IS_LONG = os.environ.get("KVDEV_LONG") == "1"
LEVELS = tuple(
    f"vllm:kv_transfer_{name}"
    for name in ("live_requests", "fence_slots_used", "leased_blocks", "quarantined_bytes", "stuck_threads")
)
TRACED = 20 if IS_LONG else 8
"""Hand-overs at most whose time to the first token is traced."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Fleet]:
    """New Pythons, as users start them; the rest of the full run, after the short one, has forks in their place."""
    drains, is_forked = {"prefill": ["--shutdown-timeout", "60"]}, "KVDEV_FULL" in os.environ
    with started_pair("dense", arguments=drains, environment=OWN_WORKERS, is_forked=is_forked) as running:
        yield running


def test_the_log_of_a_start_and_of_a_first_hand_over_is_the_one_that_the_page_quotes(pair: Fleet) -> None:
    """The first test of the pair; on 2 of 3 lines the processes of an engine race."""
    pair.routed([prompt(900)])
    starts = quoted_lines("start")
    assert len(starts) <= 3
    assert sorted(log_lines(pair.log("prefill"))) == sorted(starts), pair.log("prefill")
    (first,) = quoted_lines("first hand-over")
    assert sorted(log_lines(pair.log("decode"))) == sorted([*starts, first]), pair.log("decode")


def test_concurrent_hand_overs_give_the_text_of_one_engine_and_recompute_nothing(pair: Fleet) -> None:
    texts = [prompt(n, 30 + 40 * n) for n in range(6)]
    before = {name: pair.count("decode", name) for name in (TRANSFERS, FAILED)}
    computed = pair.count("decode", COMPUTED, source="local_compute")
    pair.assert_same_as_alone(texts)
    assert pair.count("decode", TRANSFERS) - before[TRANSFERS] == len(texts)
    assert pair.count("decode", FAILED) == before[FAILED]
    assert pair.count("decode", COMPUTED, source="local_compute") <= computed + len(texts)
    pair.assert_all_blocks_free()


def test_a_prompt_shorter_than_a_block(pair: Fleet) -> None:
    pair.assert_same_as_alone(["hi", "a"])


def test_chat_and_streaming_go_through_the_router(pair: Fleet) -> None:
    async def stream(url: str) -> str:
        async with openai_client(url, timeout_s=240) as asked:
            events = await asked.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": prompt(120)}],
                max_tokens=8,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            return "".join([event.choices[0].delta.content or "" async for event in events])

    assert asyncio.run(stream(pair.router)) == asyncio.run(stream(pair.engines["prefill"].url))


INFO_LABELS = {
    "adapter_version", "vllm_version", "kv_role", "memory", "backends", "compatibility_policy", "load_failure_policy",
    "lease_s", "ranks", "engine_ttl_s", "peer_dialect", "model_name", "engine", "engine_name", "side_channel",
}  # fmt: skip


def test_what_the_dashboard_reads_is_on_the_engines_pages(pair: Fleet) -> None:
    families = [
        (family.name, family.type) for engine in pair.engines.values() for family in families_of(engine.metrics())
    ]
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
    shown = {name + ending for name, kind in families for ending in endings.get(kind, ())}
    read = {name for text in panel_expressions().values() for name in samples_read(text)}
    assert read - shown == set()
    (info,) = samples_of(pair.engines["decode"].metrics(), "vllm:kv_transfer_info")
    assert info.labels.keys() == INFO_LABELS
    assert (info.value, info.labels["ranks"]) == (1, "1")
    assert info.labels["side_channel"] == f"127.0.0.1:{pair.engines['decode'].side_channel_port}"


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.2])
def test_clients_that_leave_strand_no_blocks(pair: Fleet, after_s: float) -> None:
    """Nor do they count as failures, which would light the critical alert."""

    def failures() -> list[float]:
        counted = [pair.count("decode", name) for name in (FAILED, FAILED_READS)]
        return [*counted, pair.log("decode").count("its KV was not taken over")]

    before = failures()

    async def leave(session: aiohttp.ClientSession) -> None:
        bodies = [{"prompt": prompt(200 + n, 60), "max_tokens": 200} for n in range(8)]
        asks = [asyncio.create_task(pair.post(session, "", body)) for body in bodies]
        await asyncio.sleep(after_s)
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)

    pair.run(leave)
    pair.assert_same_as_alone([prompt(300)])
    pair.assert_all_blocks_free(within_s=60)
    assert failures() == before


def reach(wanted: Callable[[], bool], within_s: float = 60) -> None:
    until_s = time.monotonic() + within_s
    while not wanted():
        assert time.monotonic() < until_s
        time.sleep(0.2)


def test_status_tells_what_both_engines_hold_before_and_after_a_hand_over(pair: Fleet) -> None:
    text = prompt(150, 90)
    ticket = pair.take_ticket("prefill", text)
    prefill = str(ticket["remote_engine_id"])
    reach(lambda: parts(prefill)["0.0"]["leases"] == 1)
    seen = parts(prefill)
    assert set(seen) == {"scheduler", "0.0"}
    assert seen["scheduler"]["pid"] != seen["0.0"]["pid"], "each process answers for itself"
    assert seen["scheduler"]["leases"] == 1
    assert seen["scheduler"]["leased_bytes"] > 0
    assert seen["scheduler"]["heartbeat_s"] == seen["scheduler"]["lease_s"] / 6
    engine = pair.engines["prefill"]
    assert seen["scheduler"]["http_ports"] == [engine.port]
    channel = f"127.0.0.1:{engine.side_channel_port}"
    assert {(part["name"], part["side_channel"]) for part in seen.values()} == {(f"prefill@{channel}", channel)}
    assert parts(channel).keys() == seen.keys()
    (lease,) = seen["0.0"]["oldest_leases"]
    assert lease["left_s"] > 0
    assert lease["request_id"] == ticket["remote_request_id"]
    pair.ask("decode", {"prompt": text, "max_tokens": 2, "kv_transfer_params": ticket})
    reach(lambda: parts(prefill)["scheduler"]["leases"] == 0)
    # Both are idle now: no step follows the last one.
    reach(lambda: not any(pair.count(name, level) for name in pair.engines for level in LEVELS))
    every = json.loads(adapter("status", "--json"))["engines"]
    (decode,) = [
        answer
        for answers in every.values()
        for answer in answers
        for peer in answer.get("peer_engines") or ()
        if peer["engine_id"] == prefill and answer["engine_id"] != prefill
    ]
    assert decode["thread"]["state"] == "running"
    assert decode["figures"]["transfers_done"] == pair.count("decode", TRANSFERS), "probes are counted apart"
    assert decode["reads"] == 0
    table = adapter("status", prefill)
    wanted = ("scheduler", "running", f"prefill@{channel}", "tiny")
    assert [part for part in wanted if part not in "".join(table.split())] == []
    pair.assert_all_blocks_free()


def test_check_is_a_go_for_two_live_engines_and_names_what_a_third_party_would_break(pair: Fleet) -> None:
    prefill, decode = (f"127.0.0.1:{pair.engines[name].side_channel_port}" for name in ("prefill", "decode"))
    result = json.loads(adapter("check", prefill, decode, "--json"))
    assert result["is_go"], result
    seen = {(each["topic"], each["level"]) for each in result["findings"]}
    # Both run on this machine, so their own processes tell lease, keys and seals.
    topics = ("reach", "factors", "reads", "transport", "plan", "clock", "lease", "keys", "seals")
    assert {(topic, "ok") for topic in topics} <= seen
    assert any("the probe pages came whole (checksum eacc91bb)" in each["message"] for each in result["findings"])
    short = json.dumps(
        {
            "kv_connector": "KVTransferConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kv_lease_duration": 2},
        }
    )
    refused = json.loads(adapter("check", prefill, decode, "--prefill-config", short, "--json", code=1))
    assert [each["code"] for each in refused["findings"] if each["level"] == "no-go"] == [
        "lease-shorter-than-heartbeat"
    ]
    http = f"127.0.0.1:{pair.engines['decode'].port}"
    assert "NO GO: 1 reason" in adapter("check", prefill, http, "--timeout", "20", code=1)
    pair.assert_same_as_alone([prompt(160)])


def test_a_trace_names_the_time_that_a_client_waited_for_its_first_token(pair: Fleet) -> None:
    """Both ends of the way, to prefill's frontend and from decode's, are the machine's: 2 to 5 % on a calm one, 8 to 13 % on a
    busy one. So the best of several counts in CI, and the median of many only in a long run.
    """
    most = 0.05 if IS_LONG else 0.15
    pair.let_connect("prefill", "decode")
    unexplained: list[float] = []
    for number in range(TRACED):
        waited_s = time_to_first_token(pair, f"traced-{number:02d}", prompt(170 + number, 330))
        words = ("trace", f"traced-{number:02d}", "--ttft", f"{waited_s:.6f}")
        seen = json.loads(adapter(*words, "--json", code=None))
        print(adapter(*words, code=None))
        assert seen["prefill"]["is_known"]
        assert seen["codes"] == []
        assert seen["total_s"] == pytest.approx(waited_s, abs=1e-5)
        assert all(span["is_named"] for span in seen["spans"]), seen
        # Nothing is counted twice, and clocks are not moved to make it fit: the spans fit into what the client measured.
        assert seen["named_s"] <= waited_s + max(seen["clock_uncertainty_s"].values()), seen
        unexplained.append(seen["unexplained_part"])
        if unexplained[-1] <= most and not IS_LONG:
            break
    shown = [f"{100 * part:.1f}" for part in (median(unexplained), min(unexplained), max(unexplained))]
    print(f"{len(unexplained)} hand-overs, unexplained: median {shown[0]} %, best {shown[1]} %, worst {shown[2]} %")
    assert (median if IS_LONG else min)(unexplained) <= most, unexplained
