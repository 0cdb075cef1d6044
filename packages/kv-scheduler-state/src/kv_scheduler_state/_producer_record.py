"""The producer record of a request in the scheduler process."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._machine import Trace, Transition

__all__ = ["ProducerRecord"]


@final
class ProducerRecord:
    """A request whose blocks a peer is to read."""

    __slots__ = (
        "fence",
        "is_preemption_due",
        "is_readback",
        "is_void",
        "leased_blocks",
        "preemptions",
        "prompt_tokens",
        "saved_blocks",
        "state",
        "trace",
    )

    def __init__(self, arrival: Transition, prompt_tokens: int, now_s: float, *, is_readback: bool) -> None:
        self.state = arrival.target
        self.trace: Trace = (now_s, arrival, None)
        self.prompt_tokens = prompt_tokens
        self.is_readback = is_readback
        self.is_void = False
        self.fence: tuple[int, int] | None = None
        self.saved_blocks = 0
        # Leased blocks per group, while the lease is outstanding.
        self.leased_blocks: Sequence[int] = ()
        # The engine's own count of preemptions, and whether the engine has yet to report the latest one.
        self.preemptions = 0
        self.is_preemption_due = False

    def advance(self, row: Transition, now_s: float) -> None:
        """Do the same as `_machine.advance`; in a method of the class, CPython knows where the record's slots are."""
        if row.target != self.state:
            self.state = row.target
            self.trace = now_s, row, self.trace
