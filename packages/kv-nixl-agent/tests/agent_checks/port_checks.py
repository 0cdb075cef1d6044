"""Checks that any implementation of the port must pass, as plain callables.

A `Stage` is a consumer agent, its pages, and a producer that may live in this process or in another one. The same
bodies run on the fake fabric, on real NIXL over DRAM between two processes, and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from agent_checks.stage import Stage, expect, expect_error, make_order


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


def check_descending_pairs(stage: Stage) -> None:
    """Pairs that descend together arrive where they belong."""
    stage.connect()
    count = min(16, stage.producer.page_count)
    ids = np.arange(count)[::-1]
    result = stage.read("d", ids, ids)
    expect(result.outcome == "done", f"{result}")
    stage.expect_pages(0, ids.tolist(), ids.tolist())


def check_notification_without_data(stage: Stage) -> None:
    """An empty order only notifies."""
    stage.connect()
    expect(stage.read("n", [], [], notification=b"n:4").outcome == "done", "not done")
    expect(stage.await_notifications(1) == [(stage.consumer.name, b"n:4")], "wrong notification")
    expect(stage.consumer.send_notification("p", b"HB"), "not sent")
    expect(stage.await_notifications(1) == [(stage.consumer.name, b"HB")], "wrong notification")


def check_fence(stage: Stage) -> None:
    """A current fence lets a read pass, and an order without descriptors; then it notifies. A void one does neither."""
    stage.connect()
    for slot, (local, peer) in enumerate((([0, 1], [2, 3]), ([], []))):
        stage.producer.write_fence(slot, 41)
        good = stage.read(f"good-{slot}", local, peer, fence=(slot, 41), notification=b"good:1")
        expect(good.outcome == "done" and good.is_notified, f"{good}")
        expect(good.bytes_moved == len(local) * stage.producer.page_bytes, f"{good}")
        expect(stage.await_notifications(1) == [(stage.consumer.name, b"good:1")], "wrong notification")
        stage.producer.write_fence(slot, 42)
        bad = stage.read(f"bad-{slot}", local, peer, fence=(slot, 41), notification=b"bad:1")
        expect((bad.outcome, bad.code) == ("fence-rejected", "fence-mismatch"), f"{bad}")
        expect(bad.is_memory_quiet and not bad.is_notified, f"{bad}")
        expect(stage.consumer.send_notification("p", b"end"), "not sent")
        expect(stage.await_notifications(1) == [(stage.consumer.name, b"end")], "a voided read notified")


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
    stage.consumer.remove_peer("p")
    stage.consumer.add_peer(stage.spec(has_fence=False))
    expect(stage.read("c", [2], [2]).outcome == "done", "third")


def check_sockets_stay_flat(stage: Stage) -> None:
    """A living peer that is removed and known again 300 times holds as many sockets afterwards as after ten times."""

    def cycle(count: int) -> int:
        for _ in range(count):
            stage.connect()
            expect(stage.consumer.has_peer("p"), "not known")
            stage.consumer.remove_peer("p")
        stage.connect()
        number = len(stage.results)
        expect(stage.read(f"r{number}", [0], [0]).outcome == "done", "does not work")
        stage.consumer.remove_peer("p")
        return stage.open_sockets()

    before = cycle(10)
    after = cycle(300)
    expect(after <= before + 2, f"{before} sockets after 10 cycles, {after} after 300 more")


def check_probe(stage: Stage) -> None:
    """A probe of a peer that answers is done, with or without a fence array, and whatever the word says."""
    stage.connect()
    stage.producer.write_fence(0, 123)
    expect(stage.read("with", [], [], operation="probe").outcome == "done", "with a fence")
    stage.consumer.remove_peer("p")
    stage.connect(has_fence=False)
    expect(stage.read("without", [], [], operation="probe").outcome == "done", "without a fence")
    expect_error("bad-options", lambda: stage.consumer.post(make_order("x", [0], [0], operation="probe")))


def check_notified_peer_without_rows(stage: Stage) -> None:
    """A peer without rows is notified, its fence verified and probed; pages are refused."""
    nothing = stage.local_rows[:0]
    stage.consumer.add_peer(stage.spec(local_rows=nothing, peer_rows=nothing))
    stage.producer.write_fence(1, 5)
    expect(stage.read("n", [], [], fence=(1, 5), notification=b"n:2").outcome == "done", "not notified")
    expect(stage.await_notifications(1) == [(stage.consumer.name, b"n:2")], "wrong notification")
    expect(stage.read("p", [], [], operation="probe").outcome == "done", "not probed")
    expect_error("bad-indices", lambda: stage.consumer.post(make_order("x", [0], [0])))
    expect_error(
        "bad-rows",
        lambda: stage.consumer.add_peer(stage.spec(key="q", local_rows=nothing, peer_rows=stage.producer.rows)),
    )


def check_probe_of_a_killed_producer(stage: Stage) -> None:
    """A probe of a peer that was killed fails within its deadline."""
    stage.connect()
    expect(stage.read("before", [], [], operation="probe").outcome == "done", "before")
    stage.producer.kill()
    result = stage.read("after", [], [], operation="probe", deadline_s=5.0)
    expect((result.outcome, result.code) == ("failed", "peer-disconnected"), f"{result}")
    expect(result.is_memory_quiet, "a probe touches no page")


CHECKS: tuple[Callable[[Stage], None], ...] = (
    check_random_read,
    check_descending_pairs,
    check_notification_without_data,
    check_fence,
    check_bad_input,
    check_unequal_lengths,
    check_remove_and_add_again,
    check_probe,
    check_notified_peer_without_rows,
    check_sockets_stay_flat,
)
"""Checks on a fresh stage each, with a healthy producer."""

FAULT_CHECKS: tuple[Callable[[Stage], None], ...] = (check_probe_of_a_killed_producer,)
"""Checks on a fresh stage each, that kill the producer."""
