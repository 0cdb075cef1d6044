"""Thousands of requests with kills, stops and clients that leave: nothing grows, nothing is stranded."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
from levels import Sample, sample_of
from live import FAILS, Live, Warm, started_live
from load import Load, running_load
from verdicts import GROWTH_BOUNDS, judge_all, too_large

from kvdev.steps import note

pytestmark = [
    pytest.mark.timeout(5400),
    pytest.mark.skipif(os.environ.get("KVDEV_LONG") != "1", reason="twenty minutes: dev.py test --long chaos"),
]
REQUESTS = int(os.environ.get("KVDEV_CHAOS_REQUESTS", "5000"))
SECONDS = float(os.environ.get("KVDEV_CHAOS_SECONDS", "1200"))
SURVIVORS = ("prefill-0", "decode-0")
"""Engines that no fault touches: their levels must be flat."""
FAULT_EVERY_S = 45.0
LONG_READS = 4


def kill(live: Live, load: Load, name: str, draw: random.Random) -> None:
    """Kill an engine while long reads from it, or of it, are on the wire."""
    side = (name,)
    pairs = live.pairs(prefill=side) if name.startswith("prefill") else live.pairs(decode=side)
    long = [prompt for prompt in live.prompts if len(prompt.text) > 800]
    load.aim(pairs, draw.sample(long, LONG_READS), lambda: live.kill(name), draw.uniform(0.0, 0.05))
    time.sleep(draw.uniform(0.0, 3.0))
    live.start_again(name)


def stop(live: Live, _load: Load, name: str, draw: random.Random) -> None:
    live.stop(name)
    time.sleep(draw.uniform(1.0, 6.0))
    live.resume(name)


FAULTS: tuple[tuple[Callable[[Live, Load, str, random.Random], None], str], ...] = (
    (kill, "prefill-1"),
    (kill, "decode-1"),
    (stop, "prefill-1"),
    (stop, "decode-1"),
)


def test_a_soak_of_faults_leaves_memory_handles_and_sockets_flat(warm: Warm) -> None:
    draw, faults = random.Random(16), Counter[str]()
    samples: dict[str, list[Sample]] = {name: [] for name in SURVIVORS}
    with started_live(warm, "soak") as live:
        began_s = time.monotonic()
        next_fault_s, next_note_s = began_s + FAULT_EVERY_S, began_s + 60
        # Workers that pause: about four requests a second, also where the machine is busy with other things.
        with running_load(live.load(16, workers=10, pause_s=1.5, leave_share=0.05)) as load:
            while (now_s := time.monotonic()) - began_s < SECONDS or len(load.asked) < REQUESTS:
                assert not live.dead(), f"{live.dead()} died:\n{live.engines[live.dead()[0]].last_words()}"
                time.sleep(1.0)
                for name in SURVIVORS:
                    samples[name].append(sample_of(live.engines[name].pid))
                if now_s >= next_fault_s:
                    fault, name = draw.choice(FAULTS)
                    fault(live, load, name, draw)
                    faults[f"{fault.__name__} {name}"] += 1
                    next_fault_s = time.monotonic() + FAULT_EVERY_S
                if now_s >= next_note_s:
                    note(f"  ... {len(load.asked)} requests in {now_s - began_s:.0f} s, faults {dict(faults)}")
                    next_note_s += 60
        stranded = live.stranded()
    counts, bad = judge_all(load.asked, live.outages, FAILS)
    print(f"{len(load.asked)} requests: {dict(counts)}, faults {dict(faults)}")
    for name, taken in samples.items():
        for level in GROWTH_BOUNDS:
            grown = too_large(level, [getattr(sample, level) for sample in taken])
            assert not grown, f"{name}: {grown}"
    assert not bad, bad[:5]
    assert counts["right"] > 0.8 * len(load.asked)
    assert not stranded
    assert faults.total() >= SECONDS / 60
