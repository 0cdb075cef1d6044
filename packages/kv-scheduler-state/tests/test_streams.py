"""Streamed hand-over: every order of events in small worlds.

The daily run walks two steps less than the depths below; `KVDEV_LONG=1` walks to the full depths.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from model.explore import explore
from model.stream_words import StreamRules, StreamSetting
from model.stream_world import StreamWorld

from kv_scheduler_state.fences import FencePool

WORK = (("p-work", "0"), ("p-work", "0"))
SHOWN = (("p-event", "0"), ("p-note", "0"))
POLL = ("c-poll", "0", "s0")
STREAMING = (
    *(("p-arrive", "s0"), ("c-arrive", "s0"), ("c-send",), ("p-chunk", "s0"), *WORK),
    *(("c-answer",), ("c-admit", "s0"), ("c-step",), ("c-work", "0")),
)
WHOLE = (*STREAMING, *SHOWN, POLL, ("c-land", "0", "0"), ("p-chunk", "s0"), *WORK, *SHOWN, POLL)
BROKEN = (*STREAMING, ("p-preempt", "s0"), ("p-idle",), *WORK, POLL, ("c-report", "0"), ("c-send",))
WORK_2 = tuple(("p-work", worker) for worker in "0011")
SHOWN_2 = (("p-event", "0"), ("p-note", "0"), ("p-event", "1"), ("p-note", "1"))
STREAMING_2 = (
    *(("p-arrive", "s0"), ("c-arrive", "s0"), ("c-send",), ("p-chunk", "s0"), *WORK_2, ("c-answer",)),
    *(("c-admit", "s0"), ("c-step",), ("c-work", "0"), ("c-work", "1"), *SHOWN_2, ("p-chunk", "s0"), *WORK_2, *SHOWN_2),
)
ONE_DONE = (*STREAMING_2, POLL, ("c-land", "0", "0"), ("c-fence", "0", "s0"), ("c-report", "0"))
ONE_TORN = (*ONE_DONE, ("c-poll", "1", "s0"), ("c-lose", "1", "0"), ("c-report", "1"), ("c-send",))


def world(setting, steps=()):
    """Return a world in which these steps have happened."""
    made = StreamWorld(setting)
    for step in steps:
        assert step in made.steps(), step
        made.apply(step)
    return made


IS_LONG = os.environ.get("KVDEV_LONG") == "1"
SETTINGS: dict[str, tuple[Any, ...]] = {
    "1 request of 1 chunk": (StreamSetting(rules=StreamRules(chunks=1)), None),
    "1 request": (StreamSetting(), 11),
    "1 request, parts lost, aborted": (StreamSetting(faults=1), 10),
    "1 request, preempted": (StreamSetting(preemptions=1), 8),
    "streaming, preempted": (StreamSetting(preemptions=1), 6, STREAMING),
    "streaming, all of it": (StreamSetting(preemptions=1, faults=1, ticks=3), 4, STREAMING),
    "whole, preempted": (StreamSetting(preemptions=1), 6, WHOLE),
    "whole, all of it": (StreamSetting(preemptions=1, faults=1, ticks=2, fails_requests=True), 4, WHOLE),
    "broken, the ticket comes, aborted": (StreamSetting(preemptions=1, faults=1, max_breaks=1), 4, BROKEN),
    "streaming, preempted, voids last": (
        StreamSetting(preemptions=1, rules=StreamRules(voids_last=True)),
        5,
        STREAMING,
    ),
    "1 request, preempted, its offer is given for too long": (
        StreamSetting(preemptions=1, ticks=3, rules=StreamRules(keeps_offers=True)),
        5,
        STREAMING,
    ),
    "1 request, caches are reset": (StreamSetting(resets=1), 7),
    "streaming, preempted, caches are reset": (StreamSetting(resets=1, preemptions=1), 5, STREAMING),
    "whole, caches are reset, failures are final": (StreamSetting(resets=1, ticks=2, fails_requests=True), 5, WHOLE),
    "broken, caches are reset": (StreamSetting(resets=1, preemptions=1, max_breaks=1), 5, BROKEN),
    "2 workers, one is done, caches are reset": (StreamSetting(workers=2, resets=1), 4, ONE_DONE),
    "1 request, seconds pass": (StreamSetting(ticks=4), 7),
    "1 request, all of it, failures are final": (
        StreamSetting(preemptions=1, faults=1, ticks=3, fails_requests=True),
        6,
    ),
    "2 requests, 1 slot, voids last": (StreamSetting(requests=2, rules=StreamRules(voids_last=True)), 5),
    "2 requests, room for 1": (StreamSetting(requests=2, slots=2), 5),
    "the peer dies": (StreamSetting(deaths=1), 8),
    "streaming, the peer dies, aborted": (StreamSetting(deaths=1, faults=1, ticks=2), 5, STREAMING),
    "2 workers": (StreamSetting(workers=2), 8),
    "2 workers, one is done": (StreamSetting(workers=2, faults=1, preemptions=1, max_breaks=1), 4, ONE_DONE),
    "2 workers, one is torn": (StreamSetting(workers=2, faults=1, fails_requests=True), 4, ONE_TORN),
}


COMPLETE = "1 request of 1 chunk"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == COMPLETE else ()) for name in SETTINGS]
)
def test_no_order_of_events_breaks_a_stream(name, capsys):
    setting, max_depth, *start = SETTINGS[name]
    if max_depth is not None and not IS_LONG:
        max_depth -= 2
    result = explore(lambda: world(setting, *start), max_depth=max_depth)
    with capsys.disabled():
        print(f"\n  {name}: {result}", end="")
    assert not result.violation, str(result)
    assert result.is_complete or max_depth is not None
    assert result.states > 10


@pytest.mark.parametrize("start", [STREAMING, WHOLE])
def test_a_generation_kept_at_the_restart_is_found(start, capsys, monkeypatch):
    monkeypatch.setattr(FencePool, "renew", lambda pool, slot: (slot, pool._next - 1))
    result = explore(lambda: world(StreamSetting(preemptions=1), start), max_states=5_000)
    with capsys.disabled():
        print(f"\n  {result}", end="")
    assert "no stale page is accepted" in result.violation
