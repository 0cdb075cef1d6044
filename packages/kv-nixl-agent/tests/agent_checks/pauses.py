"""Check of an owner thread whose process pauses, for a stopped process over NIXL and for a loop under a fake clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from agent_checks.stage import expect

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PausedOwner", "check_renewals_count_before_timers"]


class PausedOwner(Protocol):
    """Owner thread that writes down the notifications it delivers, by payload, and the runs of a timer, as `timer`."""

    def watch_timer(self, period_s: float) -> None:
        """See to it that a timer of this period runs."""
        ...

    def stop(self) -> None:
        """Freeze the process."""
        ...

    def wait(self, duration_s: float) -> None:
        """Let time pass."""
        ...

    def notify(self, payload: str) -> None:
        """Send a notification to the owner, frozen or not."""
        ...

    def resume(self) -> None:
        """Let the process go on."""
        ...

    def events_since_stop(self, event: str) -> Sequence[str]:
        """Return what was written down since the last stop, once `event` is among it."""
        ...


def check_renewals_count_before_timers(owner: PausedOwner) -> None:
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
