"""Work for many peers and requests grows no faster than their number: four times as many take four times the operations.

Operations are bytecodes that the interpreter runs, so the results do not depend on the machine.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import order, peer
from read_bench import Bench

from kv_handshake.core import desk as desks
from kv_handshake.core.pacing import GatedLog
from kv_handshake.wire.asks import encode_ask
from kv_nixl_agent import AgentOptions, PeerSpec, TransferAgent, TransferOrder
from kv_nixl_agent.testing import FakeFabric, FakeNixl
from kv_scheduler_state import HeartbeatOrder, LeaseTable

FEW, MANY = 32, 128
PER_PEER = 8
"""Reads from each peer engine."""


def operations(function: Callable[[], object]) -> int:
    count = 0

    def note(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return note

    former = sys.gettrace()
    sys.settrace(note)
    try:
        function()
    finally:
        sys.settrace(former)
    return count


def engines(count: int) -> list[Any]:
    return [peer(f"P{number}", f"10.0.0.{number}") for number in range(count)]


def reading(count: int) -> tuple[Bench, list[Any]]:
    """A coordinator with `count` reads on the wire, and the peers that it reads from."""
    bench, peers = Bench(), engines(max(1, count // PER_PEER))
    for number, each in enumerate(peers):
        bench.start(order(f"first{number}", peer=each))
        bench.finish(f"first{number}/0.0")
    for number in range(count):
        bench.reads.read(order(f"r{number}", peer=peers[number % len(peers)], peer_request_id=f"p{number}"))
    return bench, peers


def cancels(count: int) -> Callable[[], object]:
    bench, _ = reading(count)
    return lambda: [bench.reads.cancel(f"r{number}") for number in range(count)]


def stops(count: int) -> Callable[[], object]:
    bench, _ = reading(count)
    return lambda: [bench.reads.stop(f"r{number}") for number in range(count)]


def heartbeats(count: int) -> Callable[[], object]:
    bench, peers = reading(count)
    named = [tuple((f"p{n}", "") for n in range(first, count, len(peers))) for first in range(len(peers))]
    orders = [HeartbeatOrder(each, readers) for each, readers in zip(peers, named, strict=True)]
    return lambda: [bench.reads.heartbeat(each) for each in orders]


def meetings(count: int) -> Callable[[], object]:
    bench, peers = Bench(), engines(count)
    return lambda: [bench.start(order(f"r{number}", peer=each)) for number, each in enumerate(peers)]


def other_names(count: int) -> Callable[[], object]:
    """Orders whose tickets name an engine by another generation than the first one did."""
    bench, peers = Bench(), engines(count)
    for number, each in enumerate(peers):
        bench.start(order(f"first{number}", peer=each))
    orders = [order(f"r{number}", peer=each._replace(generation=1)) for number, each in enumerate(peers)]
    return lambda: [bench.reads.read(each) for each in orders]


def probes(count: int) -> Callable[[], object]:
    bench, _ = reading(PER_PEER * count)
    for number in range(PER_PEER * count):
        bench.finish(f"r{number}/0.0")
    bench.now_s += 15
    bench.reads.maintain()
    assert len(bench.agent.probes) == count
    return lambda: [bench.finish(each) for each in bench.agent.probes]


def expiries(count: int) -> Callable[[], object]:
    table = LeaseTable(max_pause_s=math.inf)
    for number in range(count):
        table.expect(f"r{number}", now_s=0.0)
        table.grant(f"r{number}", lease_s=30.0 + number, fence=None, now_s=0.0)
    return lambda: [table.take_ended(now_s=30.5 + number) for number in range(count)]


def asks(count: int) -> Callable[[], object]:
    desk = desks.AskDesk(lambda *_: None, lambda _: None, wait_s=5.0, log=GatedLog(), counts=Counter())
    incoming: Any = SimpleNamespace(envelope=(b"peer",), sender=SimpleNamespace(descriptor=3, address="10.0.0.1"))
    queries = [encode_ask(number, b"early ticket") for number in range(1, count + 1)]
    return lambda: [desk.receive(incoming, query, 0.0) for query in queries]


def posted(count: int, clock: list[float]) -> TransferAgent:
    """An agent with reads on the wire that do not end."""
    fabric, memory = FakeFabric(), np.zeros(64, np.uint8)
    region: Any = (memory.ctypes.data, 64, 0, "DRAM")
    rows = np.array([[memory.ctypes.data, 8, 0, 8, 8]], np.uint64)
    options = AgentOptions(wire_up=False)
    made = [
        TransferAgent(name, [region], options, port_factory=fabric.port, clock=lambda: clock[0])
        for name in ("reader", "peer")
    ]
    reader, producer = made
    reader.add_peer(PeerSpec("p", producer.agent_metadata(), rows, rows))
    fabric.agent("peer").stop()
    for number in range(count):
        reader.submit(TransferOrder(f"t{number}", "p", np.zeros(1, np.int32), np.zeros(1, np.int32)))
    reader.advance()
    return reader


def quarantines(count: int) -> Callable[[], object]:
    """Orders beside reads in quarantine."""
    agent = posted(count, [0.0])
    for number in range(count):
        agent.cancel(f"t{number}")
    one = np.zeros(1, np.int32)
    orders = [TransferOrder(f"u{number}", "p", one, one) for number in range(count)]
    return lambda: [agent.submit(each) for each in orders]


@pytest.mark.parametrize(
    "work", [cancels, stops, heartbeats, meetings, other_names, probes, expiries, asks, quarantines]
)
def test_work_grows_with_the_number_and_no_faster(work: Callable[[int], Callable[[], object]]) -> None:
    few, many = operations(work(FEW)), operations(work(MANY))
    assert few > FEW
    assert many / few < MANY / FEW * 1.2, f"{few} operations for {FEW}, {many} for {MANY}"


def test_reads_that_do_not_end_are_polled_by_turns_and_a_new_one_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one, checked = [0.0], np.zeros(1, np.int32), Counter[Any]()
    agent, check = posted(256, clock), FakeNixl.check

    def note(port: FakeNixl, handle: Any) -> Any:
        checked[handle] += 1
        return check(port, handle)

    monkeypatch.setattr(FakeNixl, "check", note)
    clock[0] = 1.0
    agent.advance()
    checked.clear()
    agent.submit(TransferOrder("new", "p", one, one))
    for _ in range(8):
        agent.advance()
    assert sorted(checked.values()) == [1] * 256 + [8]
