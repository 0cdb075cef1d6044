"""A device that lags behind its scheduler: marks are over once the step in front of them has been computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from seams import SimThread, SimThreads
from world import Process, World

__all__ = ["MarksDriver", "SimDevice"]

_NOTICE_S = 0.001
"""Longest time from the end of a step on the device until the worker's thread has seen it."""


@final
class SimDevice:
    """The device of an engine: counts the steps that it was given and those that it has computed."""

    def __init__(self) -> None:
        self._given = self._computed = 0
        self._waiting: list[Callable[[], None]] = []

    def given(self) -> None:
        """Take a step; it is computed later."""
        self._given += 1

    def computed(self) -> None:
        """Have computed a step."""
        self._computed += 1
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def mark(self) -> object:
        """Return a mark behind all that was given."""
        return self._given

    def is_over(self, mark: object) -> bool:
        """Tell whether everything before a mark is computed."""
        assert isinstance(mark, int)
        return self._computed >= mark

    def when_computed(self, action: Callable[[], None]) -> None:
        """Call an action when the next step is computed."""
        self._waiting.append(action)


@final
class MarksDriver:
    """Runs what waits for the device, as the thread of `ChunkMarks` does."""

    def __init__(self, world: World, threads: SimThreads, process: Process, thread: SimThread) -> None:
        self._world, self._threads, self._process, self._thread = world, threads, process, thread
        self.loop: Any = thread.loop
        self.device: SimDevice = self.loop._device
        self.is_running = True
        self.device.when_computed(self._later)

    def _later(self) -> None:
        self.device.when_computed(self._later)
        self._world.after(_NOTICE_S * self._world.random("marks").random(), self._run, self._process)

    def _run(self) -> None:
        waiting = self.loop._waiting
        while not waiting.empty() and not self.loop._is_closed:
            mark, action = waiting.get()
            assert self.device.is_over(mark)
            try:
                action()
            except Exception as error:
                self.loop._trouble("showing a chunk", error)

    def end(self) -> None:
        """Stop."""
        self.is_running = False
