"""Speed of kv-nixl-agent between two real processes, interleaved with a bare NIXL loop and with per-block descriptors.

`raw` is a loop over NIXL itself with the same rows, the same ordered indices and the same backend parameters. `seed` is
how a connector without strided rows does it: one descriptor per block, K and V apart, ids as they come, four worker
threads and otherwise the default backend. A sample is a few reads ordered at once; it lasts from the first order until
the caller knows that all have ended. Rounds take the sides in random order.

How fast a process copies depends on where its memory and its threads happen to lie, and stays so for as long as it lives: two
bare loops in two processes differ by 10 % and more. So every side is started anew several times.

Two processes run the bare loop, and `raw` is both of them; `control` is one against the other, so what it differs from 1 by is
the resolution of this run.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median

import numpy as np
from _consumers import Bare, ConsumerProcess, Indices, Ours, compute
from _rows import row

from kv_nixl_agent import BackendOptions
from kv_nixl_agent.testing import PeerProcess

PAGES = {4096: 4096, 16384: 2048, 65536: 384, 1 << 20: 48}
READS = 6
FINDS_BENCH = {"PYTHONPATH": str(Path(__file__).parent)}
STARTS = int(os.environ.get("KV_BENCH_STARTS", "5"))
ROUNDS = int(os.environ.get("KV_BENCH_ROUNDS", "3"))
SAMPLES = STARTS * ROUNDS


@contextmanager
def _consumers(peer: PeerProcess) -> Iterator[dict[str, ConsumerProcess]]:
    pages = SharedMemory(create=True, size=peer.page_bytes * peer.page_count)
    same = BackendOptions().for_host_memory().as_parameters()
    consumers = {
        "ours": ConsumerProcess(Ours, peer, pages),
        "raw": ConsumerProcess(Bare, peer, pages, **same),
        "control": ConsumerProcess(Bare, peer, pages, **same),
        "seed": ConsumerProcess(Bare, peer, pages),
    }
    yield consumers
    for consumer in consumers.values():
        consumer.close()
    pages.close()
    pages.unlink()


def _throughput(page_bytes: int) -> Iterator[dict[str, object]]:
    count = PAGES[page_bytes]
    random = np.random.default_rng(1)
    ascending = np.arange(count, dtype=np.int32)
    patterns = {
        "ascending": (ascending, ascending),
        "descending": (ascending[::-1].copy(), ascending[::-1].copy()),
        "random": (random.permutation(count).astype(np.int32), random.permutation(count).astype(np.int32)),
    }
    times = {pattern: defaultdict[str, list[float]](list) for pattern in patterns}
    order = np.random.default_rng(4)
    peer = PeerProcess(f"producer{page_bytes}", page_bytes=page_bytes, page_count=count)
    for _ in range(STARTS):
        with _consumers(peer) as consumers:
            for pattern, (local, theirs) in patterns.items():
                for side, taken in _samples(consumers, local, theirs, order).items():
                    times[pattern][side] += taken
    peer.close()
    for pattern, by_side in times.items():
        yield from _judge(f"{page_bytes // 1024} KB {pattern}", by_side, READS * count * page_bytes)


def _samples(
    consumers: dict[str, ConsumerProcess], local: Indices, theirs: Indices, order: np.random.Generator
) -> dict[str, list[float]]:
    """Return the seconds of each side, which take turns in random order; the first round warms up."""
    by_peer = np.argsort(theirs)
    bare = (local[by_peer], theirs[by_peer])
    halves = tuple(np.concatenate([ids, ids + len(ids)]).astype(np.int32) for ids in (local, theirs))
    given = {"ours": (local, theirs), "raw": bare, "control": bare, "seed": halves}
    samples: dict[str, list[float]] = {side: [] for side in given}
    for _ in range(ROUNDS + 1):
        for side in order.permutation(list(given)).tolist():
            samples[side].append(consumers[side].call("read", *given[side], READS))
    return {side: taken[1:] for side, taken in samples.items()}


def _judge(label: str, times: dict[str, list[float]], total_bytes: int) -> list[dict[str, object]]:
    """Return the ratios: medians over rounds of the two neighbouring samples' ratio, for load that comes and goes."""
    times = {**times, "ours twice": times["ours"] * 2, "both": times["raw"] + times["control"]}
    gb_s = {name: total_bytes / median(taken) / 1e9 for name, taken in times.items()}

    def judged(name: str, one: str, baseline: str, target: str = "context") -> dict[str, object]:
        found = median(other / mine for mine, other in zip(times[one], times[baseline], strict=True))
        return row(f"{name} {label}", "GB/s", gb_s[one], gb_s[baseline], target, ratio=found)

    is_small = label.startswith(("4 KB", "16 KB"))
    floors = {"random": ">= 1.3", "descending": ">= 2.5"} if is_small else {}
    return [
        judged("ratio_raw", "ours twice", "both", ">= 0.95"),
        judged("ratio_seed", "ours", "seed", floors.get(label.rpartition(" ")[2], "context")),
        judged("control", "raw", "control"),
    ]


def _costs() -> Iterator[dict[str, object]]:
    peer = PeerProcess("producer-costs", page_bytes=4096, page_count=10_000, environment=FINDS_BENCH)
    with _consumers(peer) as consumers:
        yield _post_cost(consumers)
        yield _fence_cost(consumers["ours"], peer, 1000)
        yield _fence_cost(consumers["ours"], peer, 10_000)
        yield _notification(consumers["ours"], peer)
    peer.close()


def _post_cost(consumers: dict[str, ConsumerProcess]) -> dict[str, object]:
    random = np.random.default_rng(2)
    local, theirs = (random.permutation(10_000).astype(np.int32) for _ in range(2))
    pairs = [
        (consumers["ours"].call("submit_cost", local, theirs), consumers["raw"].call("post_cost", local, theirs))
        for _ in range(SAMPLES + 1)
    ]
    ours, inline = (median(pair[side] for pair in pairs[1:]) for side in (0, 1))
    target, is_met = "<= 300 us, and inline >= 30 times as much", ours <= 0.3e-3 and ours * 30 <= inline
    name = "engine thread, posting 10000 rows"
    return row(name, "us", ours * 1e6, inline * 1e6, target, met=is_met, ratio=inline / ours)


def _fence_cost(ours: ConsumerProcess, peer: PeerProcess, pages: int) -> dict[str, object]:
    peer.write_fence(0, 7)
    ids = np.random.default_rng(3).permutation(pages).astype(np.int32)
    plain, fenced, fence = [], [], []
    for _ in range(3 * SAMPLES):
        plain.append(ours.call("fenced", ids, ids, None)[0])
        total_s, fence_s = ours.call("fenced", ids, ids, (0, 7))
        fenced.append(total_s)
        fence.append(fence_s)
    cost_s, read_s = median(fence), median(plain)
    is_met = cost_s <= max(50e-6, 0.03 * read_s)
    name = f"fence check of a read of {pages} pages of 4 KB"
    return row(name, "us", cost_s * 1e6, read_s * 1e6, "<= 50 us or 3 % of the read", met=is_met)


def _notification(ours: ConsumerProcess, peer: PeerProcess) -> dict[str, object]:
    """Time from the consumer's result to the producer's callback, while the producer computes in Python."""
    delays: dict[bool, list[float]] = {}
    for is_busy in (False, True):
        peer.notifications()
        if is_busy:
            peer.begin(compute, 2.5, 0.02)
            time.sleep(0.1)
        ends = ours.call("notify", [f"n{number}".encode() for number in range(100)], 0.013)
        if is_busy:
            peer.finish()
        time.sleep(0.05)
        delays[is_busy] = [arrived_s - ends[payload] for _, payload, arrived_s in peer.notifications()]
    busy, idle = median(delays[True]), median(delays[False])
    is_met = len(delays[True]) == 100 and busy < 2e-3
    name = "completion to notification, producer computing in 20 ms steps"
    return row(name, "us", busy * 1e6, idle * 1e6, "< 2000 us (baseline: producer idle)", met=is_met)


def run() -> Iterator[dict[str, object]]:
    """Measure everything; medians of interleaved rounds."""
    yield from _costs()
    for page_bytes in PAGES:
        yield from _throughput(page_bytes)
