"""Check of an owner thread whose process pauses, for a stopped process over NIXL and for a loop under a fake clock."""

from __future__ import annotations

from typing import Any

from agent_checks.stage import expect

__all__ = ["check_renewals_count_before_timers"]


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
