"""A random driver: one owner loop on a fake fabric, stepped by hand under a clock of its own.

Each episode draws a *configuration* first (caps, bounds, chunk sizes, number of peers, latencies, fault rates), then events:
orders of every kind, leases that end, peers that are stopped, killed, replaced and removed, calls that take time,
notifications, pauses of a minute, and at times the death of the loop. Then everything heals, and the episode ends with a close.

The driver keeps its own account of what must hold (see `_World`), so a fault is found by the promise that it breaks:

- an accepted order has exactly one result, also when the loop dies;
- a fenced read that is done holds the bytes of its lease, and its lease had not ended before the order;
- a page that is reported quiet is written by nobody any more;
- a notification comes after the calls handed over before it, a timer after both;
- refusals are justified: `queue-full` by as many live orders, `quarantine-full` by as many pages at risk;
- at rest, every pad is free or kept for the next read, no other handle is outstanding, sockets and memory are bounded;
- after the close no fence word is valid.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent_checks.recording import RecordingPort, recording_factory
from agent_checks.stage import expect
from agent_checks.world import PAGE_BYTES, Clock, Producer, World
from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.memory.fences import CLOSED_GENERATION, FENCE_PADS
from kv_nixl_agent.options import AgentOptions, ThreadOptions
from kv_nixl_agent.testing import FakeFabric
from kv_nixl_agent.thread import TransferThread
from kv_nixl_agent.values import PeerSpec, TransferOrder, TransferResult

_LOCAL_PAGES: Final = 96
_RATES: Final[tuple[dict[str, float], ...]] = (
    {},
    {"stall": 0.2},
    {"check-error": 0.02, "post-error": 0.02, "make-error": 0.02, "release-error": 0.02},
    {"disconnect": 0.02, "sticky-error": 0.02},
    {"sticky-error": 0.2},
    {"release_prepared-error": 0.3},
)


@dataclass(frozen=True)
class _Configuration:
    options: AgentOptions
    peers: int
    latency_polls: int
    rates: dict[str, float]
    dies: bool
    pads: int


def _draw(chance: random.Random) -> _Configuration:
    options = AgentOptions(
        fence_words=4,
        chunk_rows=chance.choice([0, 1, 2, 8]),
        max_inflight_bytes=chance.choice([None, PAGE_BYTES, 6 * PAGE_BYTES]),
        max_queued=chance.choice([2, 4, 1000]),
        max_quarantined_per_peer=chance.choice([1, 2, 1000]),
        wire_up=chance.random() < 0.7,
        stall_after_s=chance.choice([None, 0.05]),
        close_wait_s=0.0,
    )
    return _Configuration(
        options,
        peers=chance.randint(1, 3),
        latency_polls=chance.choice([0, 1, 3]),
        rates=dict(chance.choice(_RATES)),
        dies=chance.random() < 0.2,
        pads=chance.choice([FENCE_PADS, 2]),
    )


class _Episode:
    """A consumer's loop, its producers, and the events that befall them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock()
        self.world = World(self.clock, _LOCAL_PAGES)
        self.configuration = _draw(self.chance)
        self.fabric = FakeFabric(latency_polls=self.configuration.latency_polls, seed=seed)
        self.ports: list[RecordingPort] = []
        options = ThreadOptions(
            spin_s=0.0,
            min_sleep_s=0.0,
            max_sleep_s=0.0,
            idle_poll_s=1e-9,
            close_grace_s=0.0,
            gil_switch_interval_s=None,
        )
        self.thread = TransferThread(
            "consumer",
            [self.world.region],
            on_result=self._result_came,
            on_notification=lambda _, payload: self.world.notification_came(payload),
            on_quiet=self.world.quiet_came,
            options=self.configuration.options,
            thread_options=options,
            port_factory=recording_factory(self.fabric.port, self.ports),
            clock=self.clock,
        )
        self.thread.call_every(0.01, self.world.timer_ran)
        self.thread.call_every(0.0037, lambda: None)  # a round of timers that opens at other times
        agent = self.thread._set_up()
        assert agent is not None, "the agent does not start"
        self.agent = agent
        self.producers = [self._start_producer(f"p{number}", 1) for number in range(self.configuration.peers)]
        for producer in self.producers:
            self._add(producer)
        fences = self.agent._fences
        for _ in range(FENCE_PADS - self.configuration.pads):
            fences.pads.take()
        self.fabric.fault_rates = self.configuration.rates

    def _result_came(self, result: TransferResult) -> None:
        """Take a result, and write a fence word in the middle of everything, as an engine thread may."""
        self.world.result_came(result)
        try:
            self.agent.write_fence(0, 5)
        except AgentError as error:
            expect(error.code == "agent-closed", f"a fence word was refused with {error.code}")

    def _give(self, order: TransferOrder) -> None:
        """Hand an order over, and check that the agent may accept it."""
        refused = len(self.agent._transfers.results)
        self.agent.submit(order)
        ends = self.agent._transfers.results[refused:]
        if not any(end.transfer_id == order.transfer_id and end.outcome == "failed" for end in ends):
            self.world.accepted(order.transfer_id)

    def _start_producer(self, name: str, incarnation: int) -> Producer:
        producer = Producer(self.fabric, name, incarnation)
        rows = self.world.rows[:0]
        producer.agent.add_peer(PeerSpec("consumer", self.thread.agent_metadata(), rows, rows))
        return producer

    # --------------------------------------------------------------------------------------------------------- events

    def turn(self) -> None:
        """Run one turn of the loop."""
        self.world.turn_begins()
        self.thread._turn(self.agent)

    def step(self) -> None:
        """Let one random event happen, and some turns pass."""
        events = self.chance.choices(
            [
                self._order,
                self._end_lease,
                self._cancel,
                self._stop_or_resume,
                self._restart,
                self._remove_and_add,
                self._calls_and_notifications,
                self._pause,
                self._burst,
            ],
            [10, 3, 2, 1, 0.5, 1, 2, 0.2, 0.1],
        )
        events[0]()
        self.thread._deliver_ends(self.agent)
        for _ in range(self.chance.choice([0, 1, 1, 2, 5])):
            self.clock.now_s += 0.002
            self.turn()

    def _burst(self) -> None:
        """Order more than a hundred things that end soon, while others may be stalled."""
        for _ in range(130):
            self._order_from(self.chance.choice(self.producers), size=0, deadline_s=1000.0)

    def _order(self) -> None:
        producer = self.chance.choice(self.producers)
        size = self.chance.choice([0, 0, 1, 2, 4])
        self._order_from(producer, size=size, deadline_s=self.chance.choice([0.01, 0.1, 30.0]))

    def _order_from(self, producer: Producer, *, size: int, deadline_s: float) -> None:
        slot = self.chance.randrange(4)
        kind = self.chance.choices(["fenced", "plain", "probe"], [6, 2, 1])[0]
        local = [] if kind == "probe" else self.world.take_pages(size)
        theirs = producer.pages_of(slot)[: len(local)]
        generation = producer.generations[slot] - self.chance.choice([0, 0, 0, 1])
        order = TransferOrder(
            self.world.next_id(),
            producer.name,
            np.array(local, dtype=np.int32),
            np.array(theirs, dtype=np.int32),
            notification=self.chance.choice([b"", b"n"]),
            deadline_s=deadline_s,
            fence=(slot, generation) if kind == "fenced" else None,
            operation="probe" if kind == "probe" else "read",
        )
        self.world.ordered(order, producer, self.configuration.options)
        self.thread._mailbox.put(lambda: self._give(order))

    def _end_lease(self) -> None:
        producer = self.chance.choice(self.producers)
        if not producer.is_stopped:
            producer.end_lease(self.chance.randrange(4))

    def _cancel(self) -> None:
        live = self.world.live_ids()
        for transfer_id in self.chance.sample(live, min(len(live), 3)):
            self.agent.cancel(transfer_id)

    def _stop_or_resume(self) -> None:
        producer = self.chance.choice(self.producers)
        producer.stop_or_resume()
        if not producer.is_stopped:
            self.fabric.land_late_writes()

    def _restart(self) -> None:
        number = self.chance.randrange(len(self.producers))
        former = self.producers[number]
        former.die()
        rates, self.fabric.fault_rates = self.fabric.fault_rates, {}
        self.producers[number] = self._start_producer(former.name, former.incarnation + 1)
        self._replace(self.producers[number])
        self.fabric.fault_rates = rates

    def _remove_and_add(self) -> None:
        producer = self.chance.choice(self.producers)
        rates = self.fabric.fault_rates
        self.fabric.fault_rates = {name: rate for name, rate in rates.items() if name == "release_prepared-error"}
        self._replace(producer)
        self.fabric.fault_rates = rates

    def _add(self, producer: Producer) -> None:
        self.agent.add_peer(producer.spec(self.world.rows))

    def _replace(self, producer: Producer) -> None:
        self.agent.remove_peer(producer.name)
        self._add(producer)

    def _calls_and_notifications(self) -> None:
        for _ in range(self.chance.choice([1, 3, 8])):
            self.thread._mailbox.put(self.world.make_call(cost_s=self.chance.choice([0.0, 3e-4])))
            if self.chance.random() < 0.4:
                producer = self.chance.choice(self.producers)
                self.world.notify(producer, self.fabric)

    def _pause(self) -> None:
        self.clock.now_s += self.chance.choice([0.3, 60.0])

    # ------------------------------------------------------------------------------------------------------------ end

    def heal(self) -> None:
        """End all faults and let everything come to rest."""
        self.fabric.fault_rates = {}
        for producer in self.producers:
            if producer.is_stopped:
                producer.stop_or_resume()
        for _ in range(4000):
            self.clock.now_s += 0.01
            self.turn()
            if not (self.agent.is_busy or self.thread.health().calls_waiting):
                break
        for _ in range(100):
            self.clock.now_s += 0.01
            self.turn()
        # Where NIXL repeats an error, quarantine lasts until the agent is closed.
        is_error_sticky = "sticky-error" in self.configuration.rates
        expect(
            is_error_sticky or not self.agent.quarantine(), f"quarantine does not end: {self.agent.quarantine()[:3]}"
        )
        self._expect_rest()

    def _expect_rest(self) -> None:
        health = self.thread.health()
        expect(health.callback_errors + health.loop_errors == 0, health.last_traceback)
        is_held = bool(self.agent.quarantine())
        if not is_held:
            self.world.expect_all_ended()
        statistics = self.agent.statistics()
        free, given = statistics["fence_pads_free"], self.configuration.pads
        expect(free == given, f"{free} of {given} pads are free")
        is_refusing = "make-error" in self.configuration.rates
        expect(is_refusing or not self.world.rejected, f"rejected for no reason: {self.world.rejected[:3]}")
        expect(statistics["queued"] == statistics["inflight_bytes"] == 0, "something is counted that has ended")
        expect(is_held or statistics["peers_retiring"] == 0, "a removed peer is kept")
        outstanding = {key: peer["outstanding"] for key, peer in self.agent.peers().items()}
        kept = Counter(check.peer.key for check in self.agent._checks._kept.values())
        expect(is_held or +Counter(outstanding) == kept, f"outstanding handles {outstanding}, {kept} of them kept")
        unloaded = self.fabric.agents_unloaded_alive
        expect(
            not unloaded or "disconnect" in self.configuration.rates, f"{unloaded} unloaded agents leak their sockets"
        )

    def end(self) -> None:
        """Close, or die with orders on their way."""
        if self.configuration.dies:
            for _ in range(5):
                self._order()
            self.turn()
            for _ in range(20):
                self._order()
            self.thread._fail(AgentError("thread-dead", "the driver ended it"))
        self.thread._is_closing = True
        self.thread._tear_down(self.agent)
        self.world.expect_all_ended()
        fences = self.agent._fences
        words = {fences.read(slot) for slot in range(4)}
        expect(words == {CLOSED_GENERATION}, f"fence words {words} after the close")
        handles = self.ports[0].open_handles()
        expect(handles["transfer"] == handles["registration"] == 0, f"handles are left: {handles}")
        expect(self.ports[0].double_releases == 0, "a handle was released twice")


def run_episode(seed: int, *, steps: int = 120) -> None:
    """Run one random episode.

    Raises:
        AssertionError: a promise was broken; the text says which, and the seed repeats it.
    """
    episode = _Episode(seed)
    for _ in range(steps):
        episode.step()
    episode.heal()
    episode.end()
