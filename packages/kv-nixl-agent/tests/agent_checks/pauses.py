"""Check of an owner thread whose process pauses, for a stopped process over NIXL and for a loop under a fake clock."""

from __future__ import annotations

import time
from typing import Any

from agent_checks.stage import expect
from kv_nixl_agent.tools.producer import Producer


def check_renewals_count_before_timers(owner: Any) -> None:
    """The process stands for a second; its timer of 20 ms must see the notification that was sent meanwhile, then run."""
    for number in range(3):
        owner.watch_timer(0.02)
        owner.stop()
        owner.wait(0.7)
        owner.notify(f"renew {number}")
        owner.wait(0.3)
        owner.resume()
        seen = owner.events_since_stop(f"renew {number}")
        expect(seen[0] == f"renew {number}", f"after the pause came {seen}")
        expect("timer" in owner.events_since_stop("timer"), "the timer stands still")


def watch_timer(producer: Producer, period_s: float) -> None:
    """Let the runs of a timer appear among a producer's notifications; return once it runs."""
    producer.thread.call_every(period_s, lambda: producer.arrived.append(("", b"timer", time.monotonic())))
    events_since(producer, 0.0, "timer")


def events_since(producer: Producer, began_s: float, event: str) -> list[str]:
    """Return notifications and timer runs since that monotonic time, in order, once `event` is among them or 20 s passed."""
    end_s = time.monotonic() + 20.0
    while True:
        seen = [payload.decode() for _, payload, at_s in list(producer.arrived) if at_s >= began_s]
        if event in seen or time.monotonic() > end_s:
            return seen
        time.sleep(0.01)
