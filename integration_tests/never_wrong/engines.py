"""An engine: production's scheduler side and one production worker side per rank, over invented memory.

Only vLLM's part is played here: it allocates blocks, writes what a forward pass would have written, and carries the two messages of
each step between the scheduler and the workers.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
from blocks import Lists, Pool
from fabric import Fabric
from geometry import Model, Side
from hands import Clock, HandThread, SideChannel, StillClient
from memory import Array, Content, RankMemory, make_facts, span_tokens
from numpy.lib.stride_tricks import as_strided

from vllm_adapter.config import Settings
from vllm_adapter.wiring import SchedulerParts, WorkerParts
from vllm_adapter.worker.engine_thread import WorkerSide

__all__ = ["BLOCKS", "Converter", "Engine", "HandParts"]

BLOCKS = 96
LEASE_S = 30.0


class HandParts:
    """Production's parts of a worker, with the thread and the handshake turned by hand."""

    def __init__(self, parts: WorkerParts, channel: SideChannel, threads: list[HandThread] | None) -> None:
        self._parts, self._channel, self._threads = parts, channel, threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parts, name)

    def make_transfer_thread(self, *arguments: Any, **options: Any) -> Any:
        thread = self._parts.make_transfer_thread(*arguments, **options)
        if self._threads is not None:
            thread = HandThread(thread)
            self._threads.append(thread)
        return thread

    def make_handshake_client(self) -> StillClient:
        return StillClient(self._channel, self._parts.facts.factors)


class Converter:
    """Puts received pages in order with numpy, one cell of a move at a time."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        self.pages = 0

    def convert(self, steps: Any) -> None:
        for step, region in ((step, region) for step in steps for region in step.regions):
            self.pages += len(step.pages)
            for page in step.pages.tolist():
                self._page(step.permutation, region.address - self._memory.base + page * region.stride_bytes)

    def _page(self, how: Any, at: int) -> None:
        start, size = at + how.start_bytes, how.span * how.word_bytes
        target = self._memory.data[start : start + size]
        words, received = target.view(f"u{how.word_bytes}"), target.copy().view(f"u{how.word_bytes}")
        for move in how.moves:
            to = as_strided(words[move.target_offset :], move.shape, [n * how.word_bytes for n in move.target_strides])
            source = [n * how.word_bytes for n in move.source_strides]
            to[...] = as_strided(received[move.source_offset :], move.shape, source)


class Engine:
    """One engine of a case."""

    def __init__(
        self, name: str, port: int, model: Model, side: Side, *, clock: Clock, fabric: Fabric, channel: SideChannel,
        rng: random.Random, is_threaded: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.model, self.side, self.clock = name, model, side, clock
        self.settings = Settings(fence_slots=8, kv_lease_duration=LEASE_S, receive_conversion=side.conversion)
        numbers = np.random.default_rng(rng.getrandbits(32))
        self.memories = [RankMemory(model, side, rank, BLOCKS, numbers) for rank in range(side.tp)]
        self.threads: list[HandThread] = []
        self.workers: list[WorkerSide] = []
        self.converters: list[Converter] = []
        self.pool = Pool(BLOCKS, rng)
        generation = rng.randint(1, 2**40)
        envelopes = {}
        for rank, memory in enumerate(self.memories):
            facts = make_facts(model, side, rank, BLOCKS, name, port, generation)
            parts = WorkerParts(facts, self.settings, port_factory=fabric.factory(memory))
            worker = WorkerSide(facts, HandParts(parts, channel, None if is_threaded else self.threads))
            converter = Converter(memory)
            self.converters.append(converter)
            worker.register(memory.caches, None if side.conversion == "never" else converter)
            envelopes[0, rank] = worker.envelope
            self.workers.append(worker)
        self.listen(channel, port, envelopes)
        self.state = SchedulerParts(make_facts(model, side, 0, BLOCKS, name, port, generation), self.settings).make_state()
        self.ends: Counter[str] = Counter()
        self.sent: set[str] = set()
        self.received: dict[str, str] = {}
        self._failed: set[str] = set()
        self._numbers = itertools.count(1)

    def listen(self, channel: SideChannel, port: int, envelopes: Any) -> None:
        channel.serve("127.0.0.1", port, envelopes)

    # ------------------------------------------------------------------------------------------- the host's hooks

    def arrive(self, request_id: str, params: object, prompt: list[int]) -> tuple[str, int]:
        """Announce a request; return (why its ticket is refused, prompt tokens to drop)."""
        admission = self.state.arrive(request_id, params, prompt_tokens=len(prompt), now_s=self.clock.now_s)
        return admission.rejected_code, admission.truncate_tokens

    def external_tokens(self, request_id: str, computed: int) -> int:
        return self.state.external_tokens(request_id, computed_tokens=computed)

    def allocate(self, request_id: str, lists: Lists, external: int) -> None:
        self.state.allocate(
            request_id, block_ids=lists.ids, new_block_ids=lists.new, external_tokens=external, now_s=self.clock.now_s
        )

    def finish(self, request_id: str, lists: Lists, computed: int) -> dict[str, object] | None:
        """End a request; return its ticket."""
        decision = self.state.finish(
            request_id, reason="length", block_ids=lists.ids, computed_tokens=computed, now_s=self.clock.now_s
        )
        return dict(decision.params) if decision.params is not None else None

    def step(self) -> None:
        """Carry one step's orders down."""
        plan = self.state.take_step_plan(now_s=self.clock.now_s)
        for worker in self.workers:
            worker.start_step(plan)

    def collect(self) -> None:
        """Carry the workers' reports up, adding up ranks as vLLM does."""
        sent, received = [], []
        for worker in self.workers:
            results = worker.take_results()
            self._failed |= results.failed
            for kind, ids, done in (("sent", results.sent, sent), ("received", results.received, received)):
                for request_id in ids:
                    self.ends[kind, request_id] += 1  # type: ignore[index]
                    assert self.ends[kind, request_id] <= self.side.tp, f"{kind} {request_id} is reported twice"  # type: ignore[index]
                    if self.ends[kind, request_id] == self.side.tp:  # type: ignore[index]
                        done.append(request_id)
        self.state.transfer_results(sent=sent, received=received, failed=[r for r in received if r in self._failed])
        self.sent.update(sent)
        codes = self.failure_codes()
        for request_id in received:
            self.received[request_id] = (codes or "uncoded") if request_id in self._failed else ""

    def failure_codes(self) -> str:
        """Return the codes of the reads that failed since the last call."""
        found: set[str] = set()
        for worker in self.workers:
            found.update((worker.take_stats() or {}).get("read_failure_codes", ()))
        self._codes = getattr(self, "_codes", set()) | found
        return ",".join(sorted(self._codes))

    # ------------------------------------------------------------------------------------------------ memory

    def compute(self, content: Content, lists: Lists) -> None:
        """Write what a forward pass over all tokens of the lists would have written, on every rank."""
        for number, group in enumerate(self.model.groups):
            ids = lists.ids[number]
            if group.kind == "state":
                blocks, tokens = [ids[-1 - self.side.scratch[number]]], np.arange(0)
            else:
                span = span_tokens(self.model, self.side, number)
                tokens = np.flatnonzero(np.repeat(np.asarray(ids, bool), span))
                blocks = list(ids)
            for memory in self.memories:
                memory.write(memory.data, content, number, blocks, tokens)

    @property
    def pages_converted(self) -> int:
        return sum(converter.pages for converter in self.converters)

    def data(self) -> list[Array]:
        return [memory.data for memory in self.memories]
