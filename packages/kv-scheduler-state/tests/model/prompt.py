"""The models' knowledge of a prompt."""

from __future__ import annotations

LEASE_S = 3.0
HEARTBEAT_S = 1.0
RENEWAL_S = LEASE_S * 2 / 3


class Prompt:
    """The engine's and the observer's knowledge of one request."""

    def __init__(self, workers: int) -> None:
        self.status = "absent"
        self.is_stepped = False
        self.chunks = 0
        self.preemptions = 0
        self.is_revoked = False
        self.is_revocation_told = False
        self.is_allocated_twice = False
        self.is_release_told = False
        self.decoded = 0
        # Orders that the next plan must have, and the fence words of all starts so far.
        self.is_start_due = False
        self.completes_due = False
        self.words: tuple[int, ...] = ()
        self.released: frozenset[int] = frozenset()
        self.saved: frozenset[int] = frozenset()
        self.ticket: dict[str, object] | None = None
        # Per worker: who really reported, and when the lease really ends (None: not granted or ended).
        self.delivered: list[frozenset[str]] = [frozenset()] * workers
        self.deadlines: list[float | None] = [None] * workers
        self.reported: frozenset[int] = frozenset()
