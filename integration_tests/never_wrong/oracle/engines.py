"""An engine: production's scheduler side and one production worker side per rank, over invented memory.

Only vLLM's part is played here: it allocates blocks, writes what a forward pass would have written, and carries the two messages
of each step between the scheduler and the workers.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from gathering import Ranks
from hands import Clock, HandThread, SideChannel, StillClient, StillListener
from numpy_pages import NumpyPages
from prompts import Prompt

from kv_nixl_agent import TransferThread
from oracle.blocks import Lists, Pool
from oracle.geometry import Case, Side
from oracle.memory import Array, Content, RankMemory, make_facts, span_tokens
from vllm_adapter import wiring
from vllm_adapter.cache.geometry import local_document
from vllm_adapter.config import Settings
from vllm_adapter.scheduler.followed import Arrival, Ending
from vllm_adapter.worker.engine_thread import WorkerSide

LEASE_S = 30.0


@contextmanager
def turned_by_hand(channel: SideChannel, threads: list[HandThread]) -> Iterator[None]:
    """Let engines that are made meanwhile have threads that are turned by hand, and a side channel without sockets."""

    def transfer_thread(*arguments: Any, **options: Any) -> Any:
        threads.append(HandThread(TransferThread(*arguments, **options)))
        return threads[-1]

    with (
        patch.object(wiring, "TransferThread", transfer_thread),
        patch.object(wiring, "Client", lambda offer, **_: StillClient(channel, offer)),
        patch.object(wiring, "Listener", lambda host, port, **_: StillListener(channel, host, port)),
    ):
        yield


class Engine:
    """An engine of a case."""

    def __init__(
        self, name: str, port: int, case: Case, side: Side, *, clock: Clock, port_factory: Callable[..., Any],
        channel: SideChannel, rng: random.Random,
    ) -> None:  # fmt: skip
        self.name, self.model, self.side, self.clock = name, case.model, side, clock
        model, blocks = case.model, case.blocks
        self.settings = Settings(fence_slots=8, kv_lease_duration=LEASE_S, receive_conversion=side.conversion)
        ranks = list(itertools.product(range(side.pp), range(side.tp)))
        self.memories = [RankMemory(model, side, rank, blocks, stage) for stage, rank in ranks]
        self.threads: list[HandThread] = []
        self.workers: list[WorkerSide] = []
        self.converters: list[NumpyPages] = []
        self.pool = Pool(blocks, rng)
        generation = rng.randint(1, 2**40)
        envelopes: dict[tuple[int, int], bytes] = {}
        every = [make_facts(model, side, rank, blocks, name, port, generation, stage) for stage, rank in ranks]
        documents = [local_document(facts, memory.caches) for facts, memory in zip(every, self.memories, strict=True)]
        for number, (facts, memory) in enumerate(zip(every, self.memories, strict=True)):
            stages = documents[number % side.tp :: side.tp]
            worker = wiring.make_worker(facts, self.settings, port_factory=port_factory)
            converter = NumpyPages([memory.data])
            self.converters.append(converter)
            with turned_by_hand(channel, self.threads):
                worker.register(
                    memory.caches,
                    None if side.conversion == "never" else converter,
                    all_stages=lambda _, stages=stages: stages,  # type: ignore[misc]
                )
            assert worker.registration.envelope is not None
            envelopes[ranks[number]] = worker.registration.envelope
            self.workers.append(worker)
        with turned_by_hand(channel, []):
            self.scheduler = wiring.make_scheduler(every[0], self.settings, now_s=clock.monotonic)
        self.scheduler.serve(envelopes)
        self._ranks = Ranks(len(ranks))
        self.sent: set[str] = set()
        self.received: dict[str, str] = {}
        self._codes: set[str] = set()

    # ------------------------------------------------------------------------------------------- the host's hooks

    def arrive(self, request_id: str, params: object, prompt: list[int]) -> tuple[str, int]:
        """Announce a request; return (why its ticket is refused, prompt tokens that it has lost)."""
        dropped: list[int] = []
        arrival = Arrival(
            request_id, params, len(prompt), Prompt(prompt), drop_tail=lambda tokens: dropped.append(tokens) is None
        )
        self.scheduler.arrived(arrival)
        codes = (self.scheduler.take_stats() or {}).get("num_refused_tickets", [])
        del prompt[len(prompt) - sum(dropped) :]
        return ",".join(codes), sum(dropped)

    def external_tokens(self, request_id: str, computed: int) -> int | None:
        return self.scheduler.external_tokens(request_id, computed)[0]

    def allocate(self, request_id: str, lists: Lists, external: int) -> None:
        self.scheduler.allocated(request_id, lists.ids, lists.new, external_tokens=external, preemptions=0)

    def finish(
        self, request_id: str, lists: Lists, computed: int, prompt: list[int], in_flight: int = 0
    ) -> tuple[dict[str, object] | None, str]:
        """End a request; return its ticket, or why it has none."""
        ending = Ending(request_id, "length", computed + in_flight, in_flight, identity=Prompt(prompt))
        is_kept, ticket = self.scheduler.finished(ending, lists.ids)
        assert is_kept is (ticket is not None)
        return ticket, ",".join((self.scheduler.take_stats() or {}).get("num_withheld_tickets", []))

    def step(self) -> None:
        """Carry one step's orders down."""
        orders = pickle.loads(pickle.dumps(self.scheduler.build_step((), ())))
        for worker in self.workers:
            worker.apply(orders)

    def collect(self) -> None:
        """Carry the workers' reports up, adding up ranks as vLLM does."""
        step = self._ranks.add(worker.take_report() for worker in self.workers)
        again = self.sent & set(step.sent) | self.received.keys() & set(step.received)
        assert not again, f"{again} are reported twice"
        self._codes.update(failure.code for failure in step.failures)
        self.scheduler.update_output(step)
        self.sent.update(step.sent)
        codes = ",".join(sorted(self._codes))
        for request_id in step.received:
            self.received[request_id] = (codes or "uncoded") if request_id in step.failed else ""

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
        return sum(converter.pages_converted for converter in self.converters)

    def data(self) -> list[Array]:
        return [memory.data for memory in self.memories]
