"""Engines are killed ten times under load, on each side and on each transport."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

import pytest
from faults import healthy, reads_of
from live import FAILS, Live, Setting, Warm, started_live
from load import Load, running_load
from verdicts import judge_all

from kvdev.steps import note

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        os.environ.get("KVDEV_LONG") != "1", reason="engines are killed 40 times: dev.py test --long chaos"
    ),
]
KILLS = int(os.environ.get("KVDEV_CHAOS_KILLS", "10"))
TRANSPORTS: dict[str, dict[str, str]] = {"default": {}, "tcp": {"UCX_TLS": "tcp"}}
VICTIMS = {"prefill": ("prefill-0", "prefill-1"), "decode": ("decode-0", "decode-1")}
LONG_READS = 4
AFTER_RESTART_S = 2.0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("side", VICTIMS)
def test_engines_are_killed_under_load_and_every_request_ends_well(warm: Warm, side: str, transport: str) -> None:
    label = f"{side}-{transport}"
    draw = random.Random(label)
    with started_live(warm, Setting(label, TRANSPORTS[transport])) as live:
        survivors = [name for name in live.engines if name not in VICTIMS[side]]
        warm_up(live)
        assert not live.stranded(), "held before the first kill"
        reads, deaths = reads_of(live, survivors), list[str]()
        with running_load(live.load(len(label), workers=3, pause_s=0.15)) as load:
            for number in range(KILLS):
                victim = VICTIMS[side][number % len(VICTIMS[side])]
                time.sleep(draw.uniform(1.0, 2.0))
                strike(live, load, victim, draw)
                live.begin_again(victim)
                deaths += revive(live, number)
                live.wait_serving(victim)
                note(f"  ok  kill {number + 1}: {victim} is back after {live.restarts_s[-1]:.1f} s")
                time.sleep(AFTER_RESTART_S)
                deaths += revive(live, number)
        stranded = live.stranded()
        handed_over = reads_of(live, survivors) - reads
    counts, bad = judge_all(load.asked, live.outages, FAILS)
    requests, right = healthy(live, load.asked)
    print(f"{label}: {dict(counts)}, others {right} of {requests} right, {handed_over:.0f} reads, died: {deaths}")
    assert not bad, bad[:5]
    assert counts["right"] > len(load.asked) / 2
    assert requests == right > 0
    assert not stranded
    if transport == "default":
        assert not deaths
        # Counters of engines that were killed began anew.
        assert handed_over > 0 or side == "decode"


def warm_up(live: Live) -> None:
    """Let each pair connect, and every path run once."""
    with running_load(live.load(1, workers=2, pause_s=0.01)) as load:
        until = time.monotonic() + 60
        while time.monotonic() < until and len(load.asked) < 3 * len(live.prompts):
            time.sleep(0.2)
    connected = {(each.pair.prefill, each.pair.decode) for each in load.asked if each.end == "text"}
    assert len(connected) == len(live.pairs()), f"only {connected} are connected: {load.asked[:3]}"


def strike(live: Live, load: Load, victim: str, draw: random.Random) -> None:
    """Kill the victim while long reads from it, or of it, are on the wire."""
    side = (victim,)
    pairs = live.pairs(prefill=side) if victim in VICTIMS["prefill"] else live.pairs(decode=side)
    long = [prompt for prompt in live.prompts if len(prompt.text) > 800]
    load.aim(pairs, draw.sample(long, LONG_READS), lambda: live.kill(victim), draw.uniform(0.0, 0.05))


def revive(live: Live, number: int) -> Sequence[str]:
    """Start engines anew that died without being killed; return a line for each."""
    deaths: list[str] = []
    for name in live.dead():
        deaths.append(f"kill {number + 1}: {name} died\n{live.engines[name].last_words(6)}")
        last_kill_s = max(began_s for spans in live.outages.spans.values() for began_s, _ in spans)
        live.outages.begin(name, last_kill_s)
        live.begin_again(name)
        live.wait_serving(name)
    return deaths
