"""Checks that any implementation of the port must pass, as plain callables.

A `Stage` is a consumer agent, its pages, and a producer that may live in this process or in another one. The same
bodies run on the fake fabric, on real NIXL over DRAM between two processes, and on a GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from kv_nixl_agent._errors import AgentError
from kv_nixl_agent._producer_process import page_pattern
from kv_nixl_agent._values import PeerSpec, TransferOrder, TransferResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kv_nixl_agent._agent import TransferAgent
    from kv_nixl_agent._port import MemoryKind

__all__ = ["CHECKS", "FAULT_CHECKS", "ProducerControl", "Stage"]

_LIMIT_S = 20.0


class ProducerControl(Protocol):
    """What the checks need from a producer; `page_pattern(seed, ...)` is the content of its pages."""

    @property
    def agent_metadata(self) -> bytes:
        """Sealed metadata."""
        ...

    @property
    def fence(self) -> tuple[int, int, int]:
        """Location of the fence array."""
        ...

    @property
    def rows(self) -> npt.NDArray[np.uint64]:
        """One strided row over the pages."""
        ...

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        ...

    @property
    def page_count(self) -> int:
        """Number of pages."""
        ...

    def fill(self, seed: int) -> None:
        """Set the content of all pages."""
        ...

    def read_page(self, number: int) -> bytes:
        """Return the content of a page."""
        ...

    def write_fence(self, slot: int, generation: int) -> None:
        """Write a fence word."""
        ...

    def take_notifications(self) -> Sequence[tuple[str, bytes]]:
        """Return (sender, payload) since the last call."""
        ...

    def stop(self) -> None:
        """Freeze the producer."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...

    def kill(self) -> None:
        """End the producer without a word."""
        ...


@final
@dataclass
class Stage:
    """One consumer and one producer.

    Attributes:
        consumer: Agent under test, driven by `run_until`.
        producer: The other side.
        read_pages: Returns the consumer's pages, uint8 (page_count, page_bytes); a copy where they are not host
            memory.
        local_rows: One strided row over the consumer's pages, as many and as large as the producer's.
        memory_kinds: Memory kinds of (local, peer) pages.
    """

    consumer: TransferAgent
    producer: ProducerControl
    read_pages: Callable[[], npt.NDArray[np.uint8]]
    local_rows: npt.NDArray[np.uint64]
    memory_kinds: tuple[MemoryKind, MemoryKind] = ("DRAM", "DRAM")
    results: dict[str, TransferResult] = field(default_factory=dict[str, TransferResult])
    quiet: set[str] = field(default_factory=set[str])

    def spec(self, key: str = "p", *, has_fence: bool = True, **changes: object) -> PeerSpec:
        """Return the producer's description, with changes."""
        local_kind, peer_kind = self.memory_kinds
        spec = PeerSpec(
            key,
            self.producer.agent_metadata,
            self.local_rows,
            self.producer.rows,
            peer_kind,
            local_kind,
            self.producer.fence if has_fence else None,
        )
        return replace(spec, **changes)  # type: ignore[arg-type]

    def connect(self, key: str = "p", *, has_fence: bool = True) -> None:
        """Add the producer as a peer."""
        self.consumer.add_peer(self.spec(key, has_fence=has_fence))

    def read(self, transfer_id: str, local: object, peer: object, **arguments: object) -> TransferResult:
        """Read and wait for the result."""
        self.consumer.post(make_order(transfer_id, local, peer, **arguments))
        return self.wait(transfer_id)

    def wait(self, transfer_id: str, limit_s: float = _LIMIT_S) -> TransferResult:
        """Drive the consumer until a transfer has ended."""
        self.run_until(lambda: transfer_id in self.results, limit_s, f"the end of {transfer_id}")
        return self.results[transfer_id]

    def run_until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Drive the consumer until `condition`; fails after `limit_s`."""
        end_s = time.monotonic() + limit_s
        while not condition():
            expect(time.monotonic() < end_s, f"{what} did not come within {limit_s} s")
            moved = self.consumer.advance()
            for result in self.consumer.take_results():
                expect(result.transfer_id not in self.results, f"{result.transfer_id} ended twice")
                self.results[result.transfer_id] = result
            self.quiet.update(self.consumer.take_quiet())
            if not moved:
                time.sleep(20e-6)

    def await_notifications(self, count: int) -> list[tuple[str, bytes]]:
        """Wait until the producer has received `count` notifications."""
        received: list[tuple[str, bytes]] = []

        def arrived() -> bool:
            received.extend(self.producer.take_notifications())
            return len(received) >= count

        self.run_until(arrived, _LIMIT_S, f"{count} notifications")
        return received

    def expect_pages(self, seed: int, local: Sequence[int], peer: Sequence[int]) -> None:
        """Compare pages that were read with the producer's content."""
        pattern = page_pattern(seed, self.producer.page_count, self.producer.page_bytes)
        mine = self.read_pages()
        for ours, theirs in zip(local, peer, strict=True):
            expect(
                bool((mine[ours] == pattern[theirs]).all()), f"local page {ours} is not the producer's page {theirs}"
            )


def expect(holds: bool, message: str) -> None:
    """Fail a check."""
    if not holds:
        raise AssertionError(message)


def expect_error(code: str, call: Callable[[], object]) -> None:
    """Fail unless `call` raises that code."""
    try:
        call()
    except AgentError as error:
        expect(error.code == code, f"code {error.code} instead of {code}: {error}")
        return
    expect(False, f"no error instead of {code}")


def make_order(transfer_id: str, local: object, peer: object, **arguments: object) -> TransferOrder:
    """Return an order to the peer `p`."""
    fields: dict[str, object] = {"peer": "p", "deadline_s": _LIMIT_S, **arguments}
    mine, theirs = np.asarray(local, dtype=np.int32), np.asarray(peer, dtype=np.int32)
    return TransferOrder(transfer_id, local_indices=mine, peer_indices=theirs, **fields)  # type: ignore[arg-type]


def check_random_read(stage: Stage) -> None:
    """Random pages arrive where they belong and nowhere else."""
    stage.producer.fill(11)
    stage.connect()
    random = np.random.default_rng(5)
    count = stage.producer.page_count
    local, peer = random.permutation(count)[: count // 2], random.permutation(count)[: count // 2]
    before = np.array(stage.read_pages())
    result = stage.read("r", local, peer, notification=b"r:1")
    expect(result.outcome == "done", f"{result}")
    expect(result.bytes_moved == len(local) * stage.producer.page_bytes, f"{result.bytes_moved} bytes")
    expect(sum(path[3] for path in result.bytes_by_path) == result.bytes_moved, f"{result.bytes_by_path}")
    stage.expect_pages(11, local.tolist(), peer.tolist())
    untouched = np.setdiff1d(np.arange(count), local)
    expect(np.array_equal(stage.read_pages()[untouched], before[untouched]), "a page that was not asked for changed")
    received = stage.await_notifications(1)
    expect(received == [(stage.consumer.name, b"r:1")], f"{received}")


def check_descending_pairs_merge(stage: Stage) -> None:
    """Pairs that descend together move as one descriptor."""
    stage.connect()
    count = min(16, stage.producer.page_count)
    ids = np.arange(count)[::-1]
    result = stage.read("d", ids, ids)
    expect(result.outcome == "done", f"{result}")
    expect(result.merged_count in (0, 1), f"{result.merged_count} descriptors after merging")
    stage.expect_pages(0, ids.tolist(), ids.tolist())


def check_notification_without_data(stage: Stage) -> None:
    """An empty order only notifies."""
    stage.connect()
    expect(stage.read("n", [], [], notification=b"n:4").outcome == "done", "not done")
    expect(stage.await_notifications(1) == [(stage.consumer.name, b"n:4")], "wrong notification")
    expect(stage.consumer.send_notification("p", b"HB"), "not sent")
    expect(stage.await_notifications(1) == [(stage.consumer.name, b"HB")], "wrong notification")


def check_fence(stage: Stage) -> None:
    """A current fence lets the read pass and then notifies; a bumped one voids it and does not."""
    stage.connect()
    stage.producer.write_fence(3, 41)
    good = stage.read("good", [0, 1], [2, 3], fence=(3, 41), notification=b"good:1")
    expect(good.outcome == "done" and good.is_notified, f"{good}")
    expect(stage.await_notifications(1) == [(stage.consumer.name, b"good:1")], "wrong notification")
    stage.producer.write_fence(3, 42)
    bad = stage.read("bad", [0, 1], [2, 3], fence=(3, 41), notification=b"bad:1")
    expect((bad.outcome, bad.code) == ("fence-rejected", "fence-mismatch"), f"{bad}")
    expect(bad.is_memory_quiet and not bad.is_notified, f"{bad}")
    expect(stage.consumer.send_notification("p", b"end"), "not sent")
    expect(stage.await_notifications(1) == [(stage.consumer.name, b"end")], "a voided read notified")


def check_write(stage: Stage) -> None:
    """A write puts local pages into the producer's memory."""
    stage.producer.fill(21)
    stage.connect()
    expect(stage.read("r", [0], [1]).outcome == "done", "read failed")
    result = stage.read("w", [0], [4], operation="write", notification=b"w")
    expect(result.outcome == "done", f"{result}")
    stage.await_notifications(1)
    expect(stage.producer.read_page(4) == stage.producer.read_page(1), "the page did not arrive")


def check_bad_input(stage: Stage) -> None:
    """Everything malformed is refused with its code, and the agent works on."""
    agent, producer = stage.consumer, stage.producer
    rows, theirs, metadata = stage.local_rows, producer.rows, producer.agent_metadata
    outside = np.array(rows)
    outside[0, 0] += outside[0, 3] * np.uint64(1 << 20)
    far = np.array(theirs)
    far[0, 0] += far[0, 3] * np.uint64(1 << 20)

    def add(blob: bytes = metadata, local: object = rows, peer: object = theirs) -> None:
        agent.add_peer(stage.spec(has_fence=False, agent_metadata=blob, local_rows=local, peer_rows=peer))

    expect_error("rows-unregistered", lambda: add(local=outside))
    expect_error("bad-rows", lambda: add(local=rows[:, :3]))
    expect_error("bad-rows", lambda: add(peer=theirs.astype(np.float64)))
    expect_error("bad-rows", lambda: add(peer=theirs[:0]))
    expect_error("metadata-damaged", lambda: add(b""))
    expect_error("metadata-damaged", lambda: add(b"garbage" * 9))
    expect_error("metadata-damaged", lambda: add(metadata[:-1]))
    expect_error("metadata-damaged", lambda: add(metadata[: len(metadata) // 2]))
    expect_error("peer-rows-unregistered", lambda: add(peer=far))
    expect_error("unknown-peer", lambda: agent.post(make_order("x", [0], [0])))
    add()
    expect_error("peer-known", add)
    expect_error("bad-indices", lambda: agent.post(make_order("x", [0, 1], [0])))
    expect_error("bad-indices", lambda: agent.post(make_order("x", [0], [producer.page_count])))
    expect_error("bad-indices", lambda: agent.post(make_order("x", [-1], [0])))
    expect_error("bad-fence", lambda: agent.post(make_order("x", [0], [0], fence=(0, 1))))
    expect(stage.read("after", [1], [2]).outcome == "done", "the agent does not work after bad input")


def check_metadata_flips(stage: Stage) -> None:
    """Every change of one byte of sealed metadata is refused, and the true metadata still works."""
    metadata = stage.producer.agent_metadata
    for position in range(len(metadata)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(metadata)
            damaged[position] ^= flip
            expect_error(
                "metadata-damaged",
                lambda blob=bytes(damaged): stage.consumer.add_peer(stage.spec(agent_metadata=blob)),  # type: ignore[misc]
            )
    stage.connect()
    expect(stage.read("r", [0], [0]).outcome == "done", "the true metadata does not work")


def check_unequal_lengths(stage: Stage) -> None:
    """Rows of several lengths work where partners are equal, and are refused where they are not."""
    half = stage.producer.page_bytes // 2

    def table(row: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        address, full, device, stride, _ = row[0].tolist()
        return np.array([[address, full, device, stride, 4], [address, half, device, stride, 4]], dtype=np.uint64)

    stage.consumer.add_peer(
        stage.spec(has_fence=False, local_rows=table(stage.local_rows), peer_rows=table(stage.producer.rows))
    )
    expect_error("length-mismatch", lambda: stage.consumer.post(make_order("x", [0], [5])))
    result = stage.read("r", [0, 5], [1, 6])
    expect(result.outcome == "done" and result.bytes_moved == stage.producer.page_bytes + half, f"{result}")
    stage.expect_pages(0, [0], [1])


def check_remove_and_add_again(stage: Stage) -> None:
    """A peer can be removed, added again and replaced; removed peers are unknown."""
    stage.connect()
    expect(stage.read("a", [0], [0]).outcome == "done", "first")
    stage.consumer.remove_peer("p")
    expect_error("unknown-peer", lambda: stage.consumer.post(make_order("x", [0], [0])))
    stage.connect()
    expect(stage.read("b", [1], [1]).outcome == "done", "second")
    stage.consumer.replace_peer(stage.spec(has_fence=False))
    expect(stage.read("c", [2], [2]).outcome == "done", "third")


def check_killed_producer(stage: Stage) -> None:
    """After the producer was killed, a read fails with a disconnect, and its memory becomes quiet."""
    stage.connect()
    expect(stage.read("before", [0], [0]).outcome == "done", "before")
    stage.producer.kill()
    result = stage.read("after", [1], [1])
    expect((result.outcome, result.code) == ("failed", "peer-disconnected"), f"{result}")
    stage.run_until(lambda: result.is_memory_quiet or "after" in stage.quiet, 10.0, "quiet memory")
    stage.consumer.remove_peer("p")


def check_stopped_producer(stage: Stage) -> None:
    """A stopped producer costs a deadline; its late write is caught by quarantine."""
    stage.connect()
    expect(stage.read("before", [0], [0]).outcome == "done", "before")
    stage.producer.stop()
    result = stage.read("stuck", [1], [1], deadline_s=0.3, fence=None)
    if result.outcome == "done":  # read by our own kernel without the producer's help: nothing can be late
        stage.producer.resume()
        return
    expect((result.outcome, result.code) == ("timed-out", "deadline-exceeded"), f"{result}")
    expect(not result.is_memory_quiet, "memory reported quiet while the producer is stopped")
    expect([entry.transfer_id for entry in stage.consumer.quarantine()] == ["stuck"], "not in quarantine")
    stage.consumer.remove_peer("p")
    expect(stage.consumer.has_quarantine, "removing the peer ended the quarantine")
    stage.producer.resume()
    stage.run_until(lambda: "stuck" in stage.quiet, 10.0, "quiet memory")
    quiet = np.array(stage.read_pages())
    time.sleep(0.3)
    expect(np.array_equal(stage.read_pages(), quiet), "memory changed after it was reported quiet")


CHECKS: tuple[Callable[[Stage], None], ...] = (
    check_random_read,
    check_descending_pairs_merge,
    check_notification_without_data,
    check_fence,
    check_write,
    check_bad_input,
    check_metadata_flips,
    check_unequal_lengths,
    check_remove_and_add_again,
)
"""Checks on a fresh stage each, with a healthy producer."""

FAULT_CHECKS: tuple[Callable[[Stage], None], ...] = (check_killed_producer, check_stopped_producer)
"""Checks on a fresh stage each, that stop or kill the producer."""
