"""Two engines without vLLM: the production scheduler side, worker sides, planner and side channel, over NIXL or its fake.

Each engine has numpy memory in place of a KV cache; all prompts are the first tokens of one text. A test writes a prompt's pages
on the producer, walks the hooks in vLLM's order and compares the consumer's pages byte by byte.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from facts import facts
from gathering import Ranks
from numpy_pages import NumpyMirror, NumpyPages
from prompts import Prompt

from kv_scheduler_state import UNBOUND
from vllm_adapter.cache.facts import CacheGroup, EngineFacts, LayerCache
from vllm_adapter.config import Settings
from vllm_adapter.scheduler.chunks import ScheduledTokens
from vllm_adapter.scheduler.followed import Arrival, Ending
from vllm_adapter.steps import StepReport
from vllm_adapter.wiring import make_scheduler, make_worker
from vllm_adapter.worker.engine_thread import WorkerSide

HEADS, TOKENS, HEAD_SIZE, LAYERS = 4, 16, 8, 3  # TOKENS: of a block unless an engine is given another size, a multiple
_request_numbers = itertools.count(1)
EVERYWHERE = pytest.mark.parametrize("make", ["fake", "fake-lag", "nixl"], indirect=True)
"""For tests whose outcome may depend on a step of lag or on real NIXL."""


class Engine:
    """A simulated engine: the scheduler side, and one worker per tensor-parallel rank.

    `order` says which of heads and tokens is outer in a page's memory ("HND" or "NHD"); the arrays in `memory` have the axes
    (block, head, token, content) either way. With `has_mirror` these arrays are the device's, and peers only see their mirrors.
    With `dtype` float16 its pages have half the bytes of other engines'. With `has_lag` each step is ordered before the results
    of the step before are known, as vLLM's `AsyncScheduler` does.
    """

    def __init__(
        self,
        name: str,
        *,
        tp: int = 1,
        blocks: int = 64,
        tokens: int = TOKENS,
        order: str = "HND",
        has_mirror: bool = False,
        has_lag: bool = False,
        dtype: type[np.floating[Any]] = np.float32,
        port_factory: Callable[..., Any] | None = None,
        settings: Settings | None = None,
        factors: Mapping[str, object] | None = None,
        policy: str = "fail",
    ) -> None:
        self.settings = settings or Settings()
        self.name, self.tp, self.blocks, self.tokens, self.order, self.dtype = name, tp, blocks, tokens, order, dtype
        self.generation = next(_request_numbers)
        self.memory: list[list[Any]] = [[self._empty_cache() for _ in range(LAYERS)] for _ in range(tp)]
        self.mirrors: list[Any] = []
        self.converters: list[Any] = []
        self.workers: list[WorkerSide] = []
        payloads = {}
        for rank in range(tp):
            here = self._facts(rank, factors or {"model": "m", "dtype": "f"})
            worker = make_worker(here, self.settings, port_factory=port_factory)
            self._register(worker, self.memory[rank], has_mirror=has_mirror)
            assert worker.registration.envelope is not None
            payloads[0, rank] = worker.registration.envelope
            self.workers.append(worker)
        here = replace(self._facts(0, {}, free_port()), load_failure_policy=policy, is_mirrored=has_mirror)
        self.side = make_scheduler(here, self.settings)
        self.side.serve(payloads)
        self.has_lag = has_lag
        self._late: Callable[[], None] | None = None
        self._preempted: list[str] = []
        self._free = list(range(1, blocks))
        self.held: dict[str, list[int]] = {}
        self.received: dict[str, bool] = {}
        self._ranks = Ranks(tp)

    def _facts(self, rank: int, factors: Mapping[str, object], port: int = 0) -> EngineFacts:
        layers = tuple(f"layers.{n}" for n in range(LAYERS))
        return facts(
            self.name,
            port=port,
            tp=self.tp,
            tp_rank=rank,
            total_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            block_count=self.blocks,
            generation=self.generation,
            layout="LBHNC" if self.order == "HND" else "LBNHC",
            groups=(CacheGroup("attention", self.tokens, 0, 0, layers),),
            factors=dict(factors),
        )

    # ---------------------------------------------------------------------- memory; another kind overrides these four

    def _empty_cache(self) -> Any:
        made = empty_cache(self.blocks, HEADS // self.tp, self.tokens, is_heads_outer=self.order == "HND")
        return made.astype(self.dtype)

    def _register(self, worker: WorkerSide, caches: list[Any], *, has_mirror: bool) -> None:
        """Register a worker's layers, or their mirror, with what puts received pages in order."""
        mirror = NumpyMirror(caches) if has_mirror else None
        visible = caches if mirror is None else mirror.arrays
        self.converters.append(NumpyPages(visible))
        if mirror is not None:
            self.mirrors.append(mirror)
        worker.register(layer_caches(visible), self.converters[-1], mirror)

    def _write(self, cache: Any, block: int, first: int, last: int, page: np.ndarray[Any, Any]) -> None:
        """Compute the tokens [first, last) of a block: take them from `page` (head, token, content)."""
        cache[block][:, first:last] = page[:, first:last]

    def _read(self, cache: Any, block: int) -> np.ndarray[Any, Any]:
        """Return a block as (head, token, content)."""
        page: np.ndarray[Any, Any] = cache[block]
        return page

    # ------------------------------------------------------------------------------------------------ vLLM's hooks

    @property
    def state(self) -> Any:
        """The request machines behind the scheduler side."""
        return self.side._state

    @property
    def listener(self) -> Any:
        """The side channel's listener."""
        return self.side._served._listener

    def step(self, forward: Callable[[], None] | None = None, scheduled: Sequence[ScheduledTokens] = ()) -> None:
        """Run an engine step: orders to the workers, reports back to the scheduler side.

        `scheduled` are the prompt tokens that the forward pass computes.
        """
        preempted, self._preempted = self._preempted, []
        orders = self.side.build_step(preempted, scheduled)
        late, self._late = self._late, None
        if late is not None:
            late()
        if forward is not None:
            forward()
        for worker in self.workers:
            worker.apply(orders)
            worker.save(orders)
        results = partial(self._take_results, self._ranks.add(one.take_report() for one in self.workers))
        if self.has_lag:
            self._late = results
        else:
            results()

    def _take_results(self, step: StepReport) -> None:
        self.side.update_output(step)
        for request_id in step.received:
            assert request_id not in self.received, "a read was reported twice"
            self.received[request_id] = request_id not in step.failed
        for request_id in step.sent:
            self._free += self.held.pop(request_id)

    def prefill(
        self, tokens: int, *, reason: Any = "length", chunk_tokens: int | None = None, prompt: Any = None
    ) -> tuple[str, Any]:
        """Compute a prompt, in chunks if asked to, and finish it; return (request id, ticket or None)."""
        request_id = f"{self.name}-{next(_request_numbers)}"
        prompt = prompt or Prompt(range(tokens))
        self.side.arrived(Arrival(request_id, {"do_remote_decode": True}, tokens, identity=prompt))
        blocks = self.take_blocks(request_id, tokens)
        self.side.allocated(request_id, [blocks], [blocks], external_tokens=0, preemptions=0)
        for start in range(0, tokens, chunk_tokens or tokens):
            self._prefill_chunk(request_id, blocks, start, min(start + (chunk_tokens or tokens), tokens), tokens)
        if self.has_lag:
            self.step()  # ordered before the last token of the prompt's own step is known
        keeps_blocks, ticket = self.side.finished(Ending(request_id, reason, tokens, identity=prompt), [blocks])
        self.step()
        if not keeps_blocks:
            self._free += self.held.pop(request_id)
        return request_id, ticket

    def _prefill_chunk(self, request_id: str, blocks: list[int], start: int, stop: int, tokens: int) -> None:
        """Run a step that computes the tokens [start, stop); the engine adds blocks as it needs them."""
        had = -(-start // self.tokens)
        new_blocks = [blocks[had : -(-stop // self.tokens)]]
        end = len(blocks) * self.tokens if stop == tokens else stop
        scheduled = ScheduledTokens(request_id, new_blocks, start == 0, start, stop - start)
        self.step(lambda: self._compute(request_id, blocks, start, end), [scheduled])

    def _compute(self, request_id: str, blocks: list[int], start: int, stop: int) -> None:
        share = HEADS // self.tp
        for rank, layer, place in itertools.product(range(self.tp), range(LAYERS), range(len(blocks))):
            first, last = max(start - place * self.tokens, 0), min(stop - place * self.tokens, self.tokens)
            if first < last:
                page = page_of(request_id, layer, place, self.tokens)[rank * share : (rank + 1) * share]
                self._write(self.memory[rank][layer], blocks[place], first, last, page)

    def start_decode(
        self, ticket: Mapping[str, object] | None, tokens: int, *, hit_blocks: int = 0, prompt: Any = None
    ) -> str:
        """Admit a request with a ticket and allocate its blocks; return its id."""
        request_id = f"{self.name}-{next(_request_numbers)}"
        self.side.arrived(Arrival(request_id, ticket, tokens, identity=prompt or Prompt(range(tokens))))
        external, _ = self.side.external_tokens(request_id, hit_blocks * self.tokens)
        blocks = self.take_blocks(request_id, tokens)
        self.side.allocated(request_id, [blocks], [blocks[hit_blocks:]], external_tokens=external or 0, preemptions=0)
        self.step()
        return request_id

    def wait_received(self, request_id: str, within_s: float = 60) -> bool:
        """Step until the request's read has ended; return whether it was good."""
        until = time.monotonic() + within_s
        while request_id not in self.received:
            assert time.monotonic() < until, f"{request_id} was never reported: {self.snapshot()}"
            self.step()
            time.sleep(0.002)
        return self.received[request_id]

    def wait_idle(self, within_s: float = 20) -> None:
        """Step until no producer request holds blocks."""
        until = time.monotonic() + within_s
        while any(request_id.startswith(self.name) for request_id in self.held):
            assert time.monotonic() < until, f"{self.name} still holds {list(self.held)}"
            self.step()
            time.sleep(0.005)

    def assert_has(
        self, request_id: str, source: str, tokens: int, *, hit_blocks: int = 0, stored: type = np.float32
    ) -> None:
        """The request's pages equal those that `source` was computed with, on every rank and layer, and no byte is left."""
        blocks = self.held[request_id]
        share = HEADS // self.tp
        for rank, layer, place in itertools.product(
            range(self.tp), range(LAYERS), range(hit_blocks, -(-tokens // self.tokens))
        ):
            expected = page_of(source, layer, place, self.tokens)[rank * share : (rank + 1) * share]
            covered = -(-tokens // TOKENS) * TOKENS - place * self.tokens
            page = self._read(self.memory[rank][layer], blocks[place])
            np.testing.assert_array_equal(page[:, :covered], expected[:, :covered].astype(stored))
            assert not np.isnan(np.asarray(page)).any(), f"block {blocks[place]} was not filled whole"

    def assert_takes(self, ticket: Mapping[str, object] | None, source: str, tokens: int) -> str:
        """A request with this ticket is read, and has the pages that `source` was computed with; return its id."""
        request_id = self.start_decode(ticket, tokens)
        assert self.wait_received(request_id)
        self.assert_has(request_id, source, tokens)
        return request_id

    def take_over(self, producer: Engine, tokens: int, **options: Any) -> None:
        """Read a prompt that another engine computes with these options, look at its pages, and end the request."""
        source, ticket = producer.prefill(tokens, **options)
        self.finish(self.assert_takes(ticket, source, tokens))

    def finish(self, request_id: str, reason: Any = "length") -> None:
        """End a decode request and free its blocks."""
        blocks = self.held[request_id]
        self.side.finished(Ending(request_id, reason, 0, identity=UNBOUND), [blocks])
        self._free += self.held.pop(request_id)

    def take_blocks(self, request_id: str, tokens: int) -> list[int]:
        count = -(-tokens // self.tokens)
        assert len(self._free) >= count, "the simulated cache is full"
        self.held[request_id] = [self._free.pop(0) for _ in range(count)]
        return self.held[request_id]

    def snapshot(self) -> object:
        return self.state.snapshot(now_s=time.monotonic())

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.side.close()


def free_port() -> int:
    """Return a free loopback port below those that Linux gives out by itself, which a UCX beside us could take."""
    while True:
        port = 22000 + secrets.randbelow(10000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def layer_caches(arrays: Sequence[np.ndarray[Any, Any]]) -> list[LayerCache]:
    """Describe arrays as the host's seam does."""
    return [
        LayerCache(
            layer=f"layers.{n}",
            group=0,
            address=cache.ctypes.data,
            shape=cache.shape,
            stride_bytes=cache.strides,
            element_bytes=cache.itemsize,
            memory_kind="DRAM",
            device=0,
            page_bytes=cache[0].nbytes,
            element_types=(f"torch.{cache.dtype}",),
        )
        for n, cache in enumerate(arrays)
    ]


def empty_cache(blocks: int, heads: int, tokens: int, *, is_heads_outer: bool) -> np.ndarray[Any, Any]:
    """A layer's cache with the axes (block, head, token, content), in the order of memory that was asked for, full of NaN."""
    if is_heads_outer:
        return np.full((blocks, heads, tokens, 2 * HEAD_SIZE), np.nan, np.float32)
    return np.full((blocks, tokens, heads, 2 * HEAD_SIZE), np.nan, np.float32).transpose(0, 2, 1, 3)


def page_of(request_id: str, layer: int, place: int, tokens: int = TOKENS) -> np.ndarray[Any, Any]:
    """The one true content of a prompt's page: different for every request, layer, token, head and element."""
    parts = []
    for part in range(place * tokens // TOKENS, (place + 1) * tokens // TOKENS):
        seed = abs(hash((request_id, layer, part))) % (1 << 32)
        parts.append(np.random.default_rng(seed).random((HEADS, TOKENS, 2 * HEAD_SIZE), np.float32))
    return np.concatenate(parts, axis=1)
