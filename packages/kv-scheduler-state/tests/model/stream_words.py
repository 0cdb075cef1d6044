"""Parts of the streaming engines of the model: registered words, pages on a device that lags behind, and a prompt's identity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from kv_scheduler_state.plan import VOID_TOKENS, StreamChunk

Write: TypeAlias = tuple[int, str]
Job: TypeAlias = "tuple[tuple[Write, ...], StreamChunk | None]"
"""A step on the device: the pages that it writes, and the chunk that is finished with it."""


@dataclass(frozen=True, slots=True)
class StreamRules:
    """Order in which an engine and its workers do things; each is right."""

    chunks: int = 2
    voids_last: bool = False
    """Voids of a plan after its openings: right as well, since no order between requests is promised."""
    keeps_offers: bool = False
    """The listener gives an offer whose words have moved until there is another answer: right as well, by the fence."""


@dataclass(frozen=True, slots=True)
class StreamSetting:
    """Size of a world, and the order in which its engines do things.

    Attributes:
        requests: Requests that both engines get.
        slots: Words of the stream array.
        room: Requests whose blocks the decode engine has room for.
        preemptions: Preemptions, and steps of other requests into freed pages, each.
        faults: Lost parts and aborts of the decode engine, each.
        resets: Resets of each engine's cache.
        ticks: Seconds that may pass before everything is well again.
        deaths: Whether the prefill engine may die.
        workers: Workers a side.
        fails_requests: Whether the policy is to fail.
        max_breaks: Broken streams after which only the final ticket is asked for.
        rules: Order in which things are done.
    """

    requests: int = 1
    slots: int = 1
    room: int = 1
    preemptions: int = 0
    faults: int = 0
    resets: int = 0
    ticks: int = 0
    deaths: int = 0
    workers: int = 1
    fails_requests: bool = False
    max_breaks: int = 2
    rules: StreamRules = field(default_factory=StreamRules)


def early_ticket(request_id: str, *, serves: bool) -> dict[str, object]:
    """Return the params of one of the two requests of a streamed hand-over."""
    stream = {"id": f"{int(request_id[1:]):032x}", "host": "10.0.0.1", "port": 5600}
    return {"do_remote_decode": serves, "do_remote_prefill": not serves, "kv_stream": stream}


class Words:
    """The registered words of a worker, for streams and, behind those, plain leases."""

    def __init__(self, slots: int) -> None:
        self.fences = [0] * slots
        self.progress = [(0, 0)] * slots
        self.tables: list[dict[int, tuple[int, int]]] = [{} for _ in range(slots)]

    def open(self, slot: int, generation: int, tag: int) -> None:
        """Give a slot to a generation."""
        self.fences[slot] = generation
        self.progress[slot] = (tag, 0)

    def void(self, slot: int, word: int, tag: int) -> None:
        """Take a slot from its generation."""
        self.fences[slot] = word
        self.progress[slot] = (tag, VOID_TOKENS)

    def put(self, slot: int, tag: int, first: int, ids: tuple[int, ...]) -> None:
        """Store ids, each with its owner."""
        self.tables[slot].update((first + index, (tag, page)) for index, page in enumerate(ids))

    def show(self, slot: int, tag: int, tokens: int) -> None:
        """Store the progress."""
        self.progress[slot] = (tag, tokens)


def page_text(kind: str, request_id: str, number: int, epoch: int) -> str:
    """Return the content of a page, which names the epoch after a reset: `kv s0 1`, then `kv s0 1 of epoch 1`."""
    return f"{kind} {request_id} {number}" + (f" of epoch {epoch}" if epoch else "")


class Device:
    """Works off steps in order; the pages of the step that it is at hold `junk`."""

    def __init__(self, pages: int) -> None:
        self.pages = ["free"] * pages
        self.queue: list[Job] = []

    def submit(self, job: Job) -> None:
        """Queue a step."""
        if job[0]:
            self.queue.append(job)
            if len(self.queue) == 1:
                self._begin()

    def finish(self) -> StreamChunk | None:
        """Finish the first step; return the chunk that is finished with it."""
        writes, chunk = self.queue.pop(0)
        for page, content in writes:
            self.pages[page] = content
        if self.queue:
            self._begin()
        return chunk

    def computes(self, request_id: str) -> bool:
        """Whether a step of the request is queued."""
        return any(chunk is not None and chunk.request_id == request_id for _, chunk in self.queue)

    def _begin(self) -> None:
        for page, _ in self.queue[0][0]:
            self.pages[page] = "junk"
