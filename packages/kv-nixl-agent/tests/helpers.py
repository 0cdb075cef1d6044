"""Memory and agents for tests."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from agent_checks.recording import RecordingPort, recording_factory

from kv_nixl_agent import AgentError, PeerSpec, TransferAgent, TransferOrder, TransferResult, TransferThread
from kv_nixl_agent.testing import FakeFabric
from kv_nixl_agent.tools.cli import main


class Pages:
    """A region of `count` pages that outlives its agents."""

    def __init__(self, count, page_bytes, seed=None):
        self.count, self.page_bytes = count, page_bytes
        self.memory = np.zeros(count * page_bytes, dtype=np.uint8)
        if seed is not None:
            self.fill(seed)

    def fill(self, seed):
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.size, dtype=np.uint8)

    @property
    def region(self):
        return (self.memory.ctypes.data, self.memory.nbytes, 0, "DRAM")

    @property
    def rows(self):
        return np.array([[self.memory.ctypes.data, self.page_bytes, 0, self.page_bytes, self.count]], dtype=np.uint64)

    def page(self, number):
        return self.memory[number * self.page_bytes : (number + 1) * self.page_bytes]


@dataclass
class Pair:
    """A consumer and a producer on one fake fabric."""

    fabric: FakeFabric
    consumer: TransferAgent
    producer: TransferAgent
    local: Pages
    remote: Pages
    ports: list[RecordingPort]
    clock: list[float]
    results: dict = field(default_factory=dict)

    def connect(self, key="p", fence=True):
        self.consumer.add_peer(self.spec(self.producer, key, fence=self.producer.fence if fence else None))

    def spec(self, producer, key="p", **changes):
        """Describe a producer that shows the remote pages."""
        return PeerSpec(key, producer.agent_metadata(), self.local.rows, self.remote.rows, **changes)

    def run(self, turns=50, step_s=0.0):
        for _ in range(turns):
            self.consumer.advance()
            self.clock[0] += step_s
            for result in self.consumer.take_results():
                assert result.transfer_id not in self.results, "a second result"
                self.results[result.transfer_id] = result
        return self.results


def make_pair(*, pages=32, page_bytes=64, options=None, further_regions=(), tick_s=0.0, **fabric_arguments):
    """Return a pair whose clock goes on by `tick_s` whenever it is read."""
    fabric = FakeFabric(**fabric_arguments)
    ports: list[RecordingPort] = []
    factory = recording_factory(fabric.port, ports)
    clock = [100.0]

    def now_s():
        clock[0] += tick_s
        return clock[0]

    local, remote = Pages(pages, page_bytes), Pages(pages, page_bytes, seed=7)
    producer = TransferAgent("producer", [remote.region], port_factory=factory, clock=now_s)
    regions = [local.region, *further_regions]
    consumer = TransferAgent("consumer", regions, options, port_factory=factory, clock=now_s)
    return Pair(fabric, consumer, producer, local, remote, ports, clock)


def connected(*, turns=5, **arguments):
    """Return a pair whose consumer knows the producer as `p`, after some turns, in which the warm-up ends."""
    pair = make_pair(**arguments)
    pair.connect()
    pair.run(turns)
    return pair


def order(transfer_id, local, theirs, **arguments):
    arguments.setdefault("peer", "p")
    return TransferOrder(
        transfer_id,
        local_indices=np.asarray(local, dtype=np.int32),
        peer_indices=np.asarray(theirs, dtype=np.int32),
        **arguments,
    )


class Rank:
    """A transfer thread on a fake fabric with everything that it reports."""

    def __init__(self, fabric, name="rank", pages=None, **arguments):
        self.pages = pages or Pages(4, 64, seed=1)
        self.results: dict[str, list[TransferResult]] = {}
        self.events: list[str] = []
        self.quiet: list[str] = []
        self.thread = TransferThread(
            name,
            [self.pages.region],
            on_result=lambda result: self.results.setdefault(result.transfer_id, []).append(result),
            on_notification=lambda _, payload: self.events.append(payload.decode()),
            on_quiet=self.quiet.append,
            port_factory=fabric.port,
            **arguments,
        )

    def start(self):
        self.thread.start()
        return self

    def do(self, function):
        """Run on the owner thread and return what it returned or raise what it raised."""
        future: Future[Any] = Future()

        def call():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.thread.call_soon(call)
        return future.result(60)

    def hold(self):
        """Keep the owner thread busy until the returned event is set."""
        release, is_held = threading.Event(), threading.Event()

        def wait():
            is_held.set()
            release.wait(60)

        self.thread.call_soon(wait)
        assert is_held.wait(60)
        return release

    def call(self, name, cost_s=0.0):
        def run():
            time.sleep(cost_s)
            self.events.append(name)

        self.thread.call_soon(run)


def code_of(call):
    """Return the code of the `AgentError` that a call raises."""
    with pytest.raises(AgentError) as error:
        call()
    return error.value.code


def exit_code(*words):
    """Run `kv-nixl` with these words."""
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return stop.value.code


def wait_for(condition, limit_s=60.0, what="condition"):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {limit_s} s"
        time.sleep(0.001)


def stood_still(duration_s: float) -> bool:
    """Let time pass; True if this process got no core for more than 0.2 s of it, so that nothing can be said about the rest."""
    end_s = seen_s = time.monotonic()
    end_s += duration_s
    longest_s = 0.0
    while seen_s < end_s:
        time.sleep(0.01)
        last_s, seen_s = seen_s, time.monotonic()
        longest_s = max(longest_s, seen_s - last_s)
    return longest_s > 0.2


def undisturbed(measure, wait_s: float):
    """Return what `measure` says about a second in which the process always had a core, after `wait_s` of the same kind."""
    for _ in range(30):
        if stood_still(wait_s):
            continue
        before = measure()
        if not stood_still(1.0):
            return measure() - before
    pytest.fail("this machine left the process no second undisturbed")
