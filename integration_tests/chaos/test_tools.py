"""The tools that do harm and judge it, without engines: each does what it says, and each judge says no when it must."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from load import Asked, Pair, Prompt
from verdicts import Outages, growth, judge, judge_all, too_large

from kvdev.forked import ForkedProcess

PROMPT = Prompt(7, "a prompt", 3, " and its answer")
PAIR = Pair("p", "d", "http://127.0.0.1:1", "http://127.0.0.1:1")
RIGHT = Asked(PROMPT, PAIR, 10.0, 11.0, "decode", "text", " and its answer", "", False, True)


def out(engine: str, began_s: float, ended_s: float) -> Outages:
    outages = Outages()
    outages.begin(engine, began_s)
    outages.end(engine, ended_s)
    return outages


EVER = out("d", 0, math.inf)
FAILED = replace(RIGHT, end="error", text="")
FAILED_EARLY = replace(FAILED, step="prefill")


@pytest.mark.parametrize(
    ("asked", "outages", "verdict"),
    [
        (RIGHT, Outages(), "right"),
        (replace(RIGHT, text=" and its"), EVER, "wrong text"),
        (replace(RIGHT, end="broken", text=" and his"), EVER, "wrong text"),
        (replace(RIGHT, end="broken", text=" and its"), EVER, "clean error"),
        (replace(RIGHT, end="hung", text=""), EVER, "hung"),
        (FAILED, Outages(), "without excuse"),
        (FAILED, out("d", 10.5, 12), "clean error"),
        (FAILED, out("d", 11.5, 12), "without excuse"),  # out when it had ended
        (FAILED, out("other", 0, 99), "without excuse"),
        # A decode engine that computes lost prompts has no excuse in its prefill engine.
        (FAILED, out("p", 10.5, 12), "without excuse"),
        (FAILED_EARLY, out("p", 10.5, 12), "clean error"),
        (FAILED_EARLY, out("d", 10.5, 12), "without excuse"),
    ],
)
def test_an_error_needs_an_engine_that_was_out_and_a_wrong_text_is_never_excused(
    asked: Asked, outages: Outages, verdict: str
) -> None:
    assert judge(asked, outages) == verdict
    counts, bad = judge_all([asked], outages)
    assert (dict(counts), bool(bad)) == ({verdict: 1}, verdict not in {"right", "clean error"})


def test_a_decode_engine_that_fails_lost_prompts_needs_its_prefill_engine() -> None:
    assert judge(FAILED, out("p", 10.5, 12), {"d": True}) == "clean error"
    assert judge(replace(FAILED, end="broken"), out("p", 10.5, 12), {"d": True}) == "without excuse"


def test_a_leak_is_seen_and_a_spike_is_not() -> None:
    steady = [100.0 + n % 3 for n in range(100)]
    spiky = [*steady[:50], 900.0, *steady[51:]]
    leaking = [100.0 + 0.4 * n for n in range(100)]
    assert growth([9, 9, 1, 1, 1, 1, 3, 3, 3, 3]) == 2
    for name in ("resident_mb", "descriptors", "sockets", "threads"):
        assert too_large(name, steady) == too_large(name, spiky) == ""
    assert too_large("sockets", leaking) == "sockets grew by 16.0, bound 6.0"
    with pytest.raises(ValueError, match="3 samples"):
        growth([1, 2, 3])


def test_many_threads_learn_the_end_of_a_forked_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        forked = ForkedProcess(process.pid)
        assert forked.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            forked.wait(0.1)
        codes: list[int] = []
        threads = [threading.Thread(target=lambda: codes.append(forked.wait(10))) for _ in range(8)]
        for thread in threads:
            thread.start()
        process.communicate()
        for thread in threads:
            thread.join(10)
    assert codes == [0] * 8
    assert forked.poll() == 0
    forked.terminate()
