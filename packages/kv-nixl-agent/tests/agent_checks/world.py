"""The random driver's own account: producers with leases, pages with their contents, orders with their ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from agent_checks.stage import expect
from kv_nixl_agent.agent import TransferAgent
from kv_nixl_agent.options import AgentOptions
from kv_nixl_agent.testing import FakeFabric
from kv_nixl_agent.values import MemoryRegion, PeerSpec, TransferOrder, TransferResult

Rows = npt.NDArray[np.uint64]

PAGE_BYTES: Final = 32
_SLOTS: Final = 4
_PAGES_PER_SLOT: Final = 4


class Clock:
    """Monotonic seconds that move on by a microsecond with every look, so that no wait is endless."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


def _rows_of(memory: npt.NDArray[np.uint8]) -> Rows:
    return np.array([[memory.ctypes.data, PAGE_BYTES, 0, PAGE_BYTES, len(memory)]], dtype=np.uint64)


class Producer:
    """A producer process: four slots of four pages, whose content is the generation of their lease."""

    def __init__(self, fabric: FakeFabric, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.is_stopped = False
        self.generations = [1000 * incarnation + 1 for _ in range(_SLOTS)]
        """Generation of the current lease, by slot."""
        self._fabric = fabric
        self._memory = np.zeros((_SLOTS * _PAGES_PER_SLOT, PAGE_BYTES), dtype=np.uint8)
        region: MemoryRegion = (int(self._memory.ctypes.data), int(self._memory.nbytes), 0, "DRAM")
        self.agent = TransferAgent(
            name, [region], AgentOptions(fence_words=_SLOTS, wire_up=False), port_factory=fabric.port
        )
        self._port = fabric.agent(name)
        for slot in range(_SLOTS):
            self._begin_lease(slot)

    def pages_of(self, slot: int) -> list[int]:
        """Return the pages of a slot."""
        return list(range(_PAGES_PER_SLOT * slot, _PAGES_PER_SLOT * (slot + 1)))

    def spec(self, local_rows: Rows) -> PeerSpec:
        """Describe it to the consumer."""
        return PeerSpec(
            self.name, self.agent.agent_metadata(), local_rows, _rows_of(self._memory), fence=self.agent.fence
        )

    def _begin_lease(self, slot: int) -> None:
        self._memory[self.pages_of(slot)] = content_of(self.generations[slot])
        self.agent.write_fence(slot, self.generations[slot])

    def end_lease(self, slot: int) -> None:
        """Void the word, give the pages to somebody else, and begin a new lease."""
        self.generations[slot] += 1
        self.agent.write_fence(slot, self.generations[slot])
        self._memory[self.pages_of(slot)] = content_of(self.generations[slot])

    def stop_or_resume(self) -> None:
        """Freeze the process, or let it go on."""
        self.is_stopped = not self.is_stopped
        if self.is_stopped:
            self._port.stop()
        else:
            self._port.resume()

    def die(self) -> None:
        """Kill the process."""
        self._port.die()


def content_of(generation: int) -> int:
    """Return the byte that fills the pages of a lease."""
    return generation % 251


@dataclass
class _Ordered:
    order: TransferOrder
    producer: Producer
    was_void: bool
    live_before: int
    options: AgentOptions
    result: TransferResult | None = None
    is_quiet: bool = False


class World:
    """All orders with their ends, all local pages with their owners, all calls, notifications and timers."""

    def __init__(self, clock: Clock, page_count: int) -> None:
        self._clock = clock
        self._memory = np.zeros((page_count, PAGE_BYTES), dtype=np.uint8)
        self._free = list(range(page_count))
        self._at_rest: dict[int, bytes] = {}
        """Content of pages that were reported quiet, until they are used again."""
        self._orders: dict[str, _Ordered] = {}
        self._waiting: dict[str, float] = {}
        """Calls and notifications that have not come yet, with the time at which they were handed over."""
        self._calls_before: dict[str, list[str]] = {}
        self._timer_due_s = clock.now_s + 0.01
        self._turn_began_s = clock.now_s
        self._count = 0
        self.rejected: list[str] = []
        """Messages of transfers that NIXL refused to make or post."""

    @property
    def region(self) -> MemoryRegion:
        """The local pages, to register."""
        return (int(self._memory.ctypes.data), int(self._memory.nbytes), 0, "DRAM")

    @property
    def rows(self) -> Rows:
        """The local pages as one row."""
        return _rows_of(self._memory)

    def next_id(self) -> str:
        """Return a fresh name."""
        self._count += 1
        return f"x{self._count}"

    # --------------------------------------------------------------------------------------------------------- orders

    def take_pages(self, count: int) -> list[int]:
        """Return local pages that nothing may write, fewer if there are not enough."""
        taken = [self._free.pop(0) for _ in range(min(count, len(self._free)))]
        for page in taken:
            self._expect_at_rest(page)
            self._memory[page] = 255
        return taken

    def _expect_at_rest(self, page: int) -> None:
        content = self._at_rest.pop(page, None)
        expect(content in (None, self._memory[page].tobytes()), f"page {page} was written after it was reported quiet")

    def ordered(self, order: TransferOrder, producer: Producer, options: AgentOptions) -> None:
        """Note an order that is about to be handed over."""
        was_void = order.fence is not None and producer.generations[order.fence[0]] != order.fence[1]
        self._orders[order.transfer_id] = _Ordered(order, producer, was_void, len(self.live_ids()), options)

    def accepted(self, transfer_id: str) -> None:
        """Check that the agent may accept an order."""
        one = self._orders[transfer_id]
        at_risk = sum(
            other.result is not None and not other.is_quiet and other.order.peer == one.order.peer
            for other in self._orders.values()
        )
        expect(
            at_risk < one.options.max_quarantined_per_peer,
            f"accepted with {at_risk} transfers of {one.order.peer} in quarantine",
        )

    def live_ids(self) -> list[str]:
        """Return the ids of orders without a result."""
        return [transfer_id for transfer_id, one in self._orders.items() if one.result is None]

    def result_came(self, result: TransferResult) -> None:
        """Check a result against the order."""
        one = self._orders[result.transfer_id]
        expect(one.result is None, f"{result.transfer_id} has two results")
        one.result = result
        if result.code == "queue-full":
            expect(
                one.live_before + 1 >= one.options.max_queued, f"{one.live_before} live orders, and the queue is full"
            )
        if result.outcome == "done":
            self._check_done(one)
        if result.code == "transfer-rejected":
            self.rejected.append(result.message)
        if result.is_memory_quiet:
            self._become_quiet(one)

    def _check_done(self, one: _Ordered) -> None:
        order = one.order
        if order.fence is None:
            return
        expect(not one.was_void, f"{order.transfer_id} is done, but its lease had ended before it was ordered")
        for page in order.local_indices.tolist():
            found = set(self._memory[page].tolist())
            expect(
                found == {content_of(order.fence[1])}, f"{order.transfer_id} is done with the bytes of another lease"
            )

    def quiet_came(self, transfer_id: str) -> None:
        """Note that the pages of an order are quiet."""
        one = self._orders[transfer_id]
        expect(one.result is not None and not one.is_quiet, f"{transfer_id} became quiet out of turn")
        self._become_quiet(one)

    def _become_quiet(self, one: _Ordered) -> None:
        one.is_quiet = True
        for page in one.order.local_indices.tolist():
            self._at_rest[page] = self._memory[page].tobytes()
            self._free.append(page)

    def expect_all_ended(self) -> None:
        """Every order has its result and is quiet; quiet pages are as they were."""
        expect(not self.live_ids(), f"no result for {self.live_ids()[:5]}")
        loud = [transfer_id for transfer_id, one in self._orders.items() if not one.is_quiet]
        expect(not loud, f"never quiet: {loud[:5]}")
        for page in list(self._at_rest):
            self._expect_at_rest(page)

    # ----------------------------------------------------------------------------------- calls, notifications, timers

    def make_call(self, *, cost_s: float) -> Callable[[], None]:
        """Return a call that takes some time."""
        name = f"call {self.next_id()}"
        self._waiting[name] = self._clock.now_s

        def run() -> None:
            self._clock.now_s += cost_s
            del self._waiting[name]

        return run

    def notify(self, producer: Producer, fabric: FakeFabric) -> None:
        """Let a producer notify the consumer, if it is able to."""
        name = self.next_id()
        rates, fabric.fault_rates = fabric.fault_rates, {}
        if not producer.is_stopped and producer.agent.send_notification("consumer", name.encode()):
            self._calls_before[name] = [waiting for waiting in self._waiting if waiting.startswith("call ")]
            self._waiting[name] = self._clock.now_s
        fabric.fault_rates = rates

    def notification_came(self, payload: bytes) -> None:
        """Check that the calls handed over before it have run."""
        name = payload.decode()
        if name not in self._waiting:
            return  # a completion of ours
        early = [call for call in self._calls_before[name] if call in self._waiting]
        expect(not early, f"notification {name} was delivered before {early[:3]}")
        del self._waiting[name]

    def turn_begins(self) -> None:
        """Note the time."""
        self._turn_began_s = self._clock.now_s

    def timer_ran(self) -> None:
        """Check that everything handed over before the timer fell due has come."""
        late = [name for name, given_s in self._waiting.items() if given_s < self._timer_due_s]
        expect(not late, f"the timer ran before {late[:3]}")
        self._timer_due_s = self._turn_began_s + 0.01
