"""The simulated world: one heap of events, one clock, processes that run, stop and die, and a log of all that happened.

Nothing here runs in parallel. An event belongs to a process or to none. A dead process gets no events, a stopped one gets them
when it goes on, in their order. While an event runs, `current` is its process and production code reads that process's clock.

Example: process P has a clock that runs 1 % fast and was 500 s ahead at the start. At 10 s of the world it reads 510.1 s.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

_EVENTS_MOST = 400_000
_LOOK_S = 5e-6


@final
class ProcessDied(BaseException):
    """Ends a call of a process that was killed while it waited."""


@final
@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: a short kind, and the facts as a sentence."""

    kind: str
    text: str


@final
@dataclass(frozen=True, slots=True)
class Note:
    """A line of the event log; with `target` it is a message that arrives there at `until_s`."""

    at_s: float
    lane: str
    text: str
    target: str = ""
    until_s: float = 0.0


@final
class Process:
    """A process: a clock of its own, and whether it runs.

    Args:
        name: Lane of the log.
        offset_s: Its clock at the world's time 0.
        rate: Seconds of its clock per second of the world.
    """

    def __init__(self, name: str, *, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self.name = name
        self.offset_s = offset_s
        self.rate = rate
        self.is_dead = False
        self.is_asleep = False
        self.is_stopped = False
        self.busy_until_s = 0.0
        self.starved_until_s = 0.0
        self.backlog: list[Callable[[], None]] = []


@final
@dataclass(slots=True)
class World:
    """Time, events, log and violations of one episode."""

    seed: int
    now_s: float = 0.0
    elapsed_s: float = 0.0
    """Time that the running event has slept so far."""
    current: Process | None = None
    is_healed: bool = False
    """From now on no fault happens any more."""
    notes: list[Note] = field(default_factory=list[Note])
    violations: list[Violation] = field(default_factory=list[Violation])
    counts: Counter[str] = field(default_factory=Counter[str])
    accepted: set[str] = field(default_factory=set[str])
    """Requests whose reads an engine has accepted."""
    events: int = 0
    _heap: list[tuple[float, int, Process | None, Callable[[], None]]] = field(default_factory=list)
    _number: int = 0
    _randoms: dict[str, random.Random] = field(default_factory=dict[str, random.Random])

    def random(self, purpose: str) -> random.Random:
        """Return the random numbers of one purpose: what one purpose draws changes no other."""
        found = self._randoms.get(purpose)
        if found is None:
            found = self._randoms[purpose] = random.Random(f"{self.seed}/{purpose}")
        return found

    @property
    def time_s(self) -> float:
        """The present time, inside of an event too."""
        return self.now_s + self.elapsed_s

    def clock(self) -> float:
        """Return what the running process's clock reads; each look takes 5 us, so that no wait is endless."""
        self.elapsed_s += _LOOK_S
        process = self.current
        return self.time_s if process is None else process.offset_s + process.rate * self.time_s

    def note(self, lane: str, text: str, target: str = "", until_s: float = 0.0) -> None:
        """Write a line of the log; with `target` it is a message that arrives there at `until_s`."""
        self.notes.append(Note(self.time_s, lane, text, target, until_s))

    def violated(self, kind: str, text: str) -> None:
        """Note a broken promise; the episode ends after this event."""
        self.violations.append(Violation(kind, text))
        self.note("CHECK", f"{kind}: {text}")

    def log_hash(self) -> str:
        """Return the digest of the whole log."""
        state = hashlib.sha256()
        for note in self.notes:
            state.update(f"{note.at_s:.9f}|{note.lane}|{note.text}|{note.target}|{note.until_s:.9f}\n".encode())
        return state.hexdigest()[:16]

    # ------------------------------------------------------------------------------------------------------ events

    def after(self, delay_s: float, action: Callable[[], None], process: Process | None = None) -> None:
        """Run an action after a delay of the world's time, on a process if one is given."""
        self._number += 1
        heapq.heappush(self._heap, (self.time_s + max(0.0, delay_s), self._number, process, action))

    def run(self, until_s: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Run events until a time, a violation, or the end of everything."""
        while self._heap and self._heap[0][0] <= until_s and not self.violations and not is_done():
            at_s, _, process, action = heapq.heappop(self._heap)
            self.now_s, self.elapsed_s = max(self.now_s, at_s), 0.0
            if process is not None and not self._may_run(process, action):
                continue
            self.events += 1
            if self.events > _EVENTS_MOST:
                self.violated("endless", f"more than {_EVENTS_MOST} events")
                return
            self.act(process, action)
        if not self.violations and not is_done():
            self.now_s, self.elapsed_s = max(self.now_s, until_s), 0.0

    def act(self, process: Process | None, action: Callable[[], None]) -> None:
        """Run an action as a process, at once; actions may nest."""
        former, self.current = self.current, process
        try:
            action()
        finally:
            self.current = former
            if process is not None:
                process.busy_until_s = self.time_s

    def _may_run(self, process: Process, action: Callable[[], None]) -> bool:
        if process.is_dead:
            return False
        if process.is_stopped:
            process.backlog.append(action)
            return False
        if process.busy_until_s > self.now_s:
            self.after(process.busy_until_s - self.now_s, action, process)
            return False
        return True

    def wait(self, duration_s: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Let the running event wait, by its process's clock, while everything else goes on.

        Raises:
            ProcessDied: The process was killed meanwhile.
        """
        process = self.current
        assert process is not None
        until_s = self.now_s + duration_s / process.rate
        while not (is_done() or process.is_dead or self.violations) and (self.now_s < until_s or process.is_stopped):
            self.run(max(until_s, self.now_s + 0.01), lambda: is_done() or process.is_dead)
        if process.is_dead:
            raise ProcessDied

    def resume(self, process: Process) -> None:
        """Let a stopped process go on with what has come meanwhile."""
        process.is_stopped = False
        backlog, process.backlog = process.backlog, []
        for action in backlog:
            self.after(0.0, action, process)
