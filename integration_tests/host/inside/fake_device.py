"""A device with streams and events, whose memory is the host's: it does what it was given late, in any order that they allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import torch


class Stream:
    """Work, marks and waits that were given and are not done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: deque[tuple[str, Callable[[], None] | Event]] = deque()


class Event:
    """Over once its stream has come to it."""

    def __init__(self) -> None:
        self.is_over = False


class FakeStreams:
    """Stands for `CudaStreams`; the test is the engine thread, and `engine` its stream.

    `eager` is the chance that the device gets on by one piece of work whenever it is asked for anything.
    """

    def __init__(self, seed: int, eager: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._eager = eager
        self.engine = Stream("engine")
        self.streams = [self.engine]
        self.synchronized: list[str] = []
        self.done: list[str] = []
        """Streams in the order in which the device did their work."""

    def current(self) -> Stream:
        return self.engine

    def make(self) -> Stream:
        self.streams.append(Stream(f"side {len(self.streams)}"))
        return self.streams[-1]

    def queue(self, stream: Stream, work: Callable[[], None]) -> None:
        stream.given.append(("work", work))
        self._perhaps()

    def mark(self, stream: Stream | None = None) -> Event:
        event, stream = Event(), stream or self.engine
        stream.given.append(("mark", event))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.given.append(("wait", event))

    def is_over(self, event: Event) -> bool:
        self._perhaps()
        return event.is_over

    def synchronize(self, stream: Stream) -> None:
        self.synchronized.append(stream.name)
        while stream.given:
            assert self.step(), f"{stream.name} never goes on"

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), 0x5A, dtype=dtype)

    def _perhaps(self) -> None:
        if self._random.random() < self._eager:
            self.step()

    def step(self) -> bool:
        """Do one thing that is possible now; False if there is none."""
        possible = [stream for stream in self.streams if stream.given and not _waits(stream)]
        if not possible:
            return False
        stream = self._random.choice(possible)
        kind, what = stream.given.popleft()
        if isinstance(what, Event):
            what.is_over = what.is_over or kind == "mark"
        else:
            with torch.inference_mode():  # as its callers were
                what()
            self.done.append(stream.name)
        return True

    def finish(self) -> None:
        """Do all that was given."""
        while self.step():
            pass
        assert not any(stream.given for stream in self.streams), "something never goes on"


def _waits(stream: Stream) -> bool:
    kind, what = stream.given[0]
    return kind == "wait" and isinstance(what, Event) and not what.is_over
