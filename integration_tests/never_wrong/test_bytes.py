"""Every byte of every consumer rank, over random pairs of engines: production from ticket to bytes against plain slicing.

A failure prints one line per failing seed that reproduces it. Of the pairs the short run plays 1500, the rest of
the full run (`KVDEV_FULL=1`) the next 2000, and the weekly run (`KVDEV_LONG=1`) 200 000.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
from oracle.geometry import draw
from oracle.runner import try_seed

IS_LONG, IS_FULL = (os.environ.get(name) == "1" for name in ("KVDEV_LONG", "KVDEV_FULL"))
SEEDS = range(200_000) if IS_LONG else range(1_500, 3_500) if IS_FULL else range(1_500)
PAIRS = len(SEEDS)
_CHUNK = 125


def _play(seeds: range) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Play the cases of some seeds; return what was counted and what went wrong."""
    gc.disable()  # a case leaves cycles behind; they are collected between chunks
    counts: Counter[str] = Counter()
    wrong: list[tuple[int, str]] = []
    for seed in seeds:
        outcome, why = try_seed(seed)
        case = draw(seed)
        counts.update({"cases": 1, "read": outcome.read, "hits": outcome.hits, "bytes": outcome.bytes_compared})
        counts["converted"] += outcome.pages_converted
        counts.update({f"code {code}": number for code, number in outcome.codes.items()})
        if outcome.read:
            counts[f"tp {case.producer.tp} {case.consumer.tp}"] += 1
            counts["stages"] += case.consumer.pp > 1
            counts.update({f"kind {group.state or group.kind}" for group in case.model.groups})
        if why:
            wrong.append((seed, why))
    gc.collect()
    return counts, wrong


@pytest.mark.proves(
    "dense, latent, windows, chunks, Mamba-2, other states: equal ranks, unequal ranks, unequal blocks, pipeline",
    "dense, latent, windows, chunks, Mamba-2, other states: prefix hits",
    "dense, latent: context",
)
@pytest.mark.sized
@pytest.mark.timeout(7200 if IS_LONG else 1800)
def test_no_byte_is_wrong_in_random_pairs() -> None:
    began_s = time.monotonic()
    chunks = [SEEDS[first : first + _CHUNK] for first in range(0, PAIRS, _CHUNK)]
    total: Counter[str] = Counter()
    wrong: list[tuple[int, str]] = []
    # A worker that dies ends the test with `BrokenProcessPool`; a `multiprocessing.Pool` would wait for it for ever.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for counts, failures in pool.map(_play, chunks):
            total += counts
            wrong += failures
            if len(wrong) >= 20:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    print(f"{total['cases']} pairs in {time.monotonic() - began_s:.0f} s: {dict(sorted(total.items()))}")
    kinds = Counter(why.split(" byte ")[0] for _, why in wrong)
    lines = [f"integration_tests/never_wrong/replay.py {seed}: {why}" for seed, why in sorted(wrong)]
    assert not wrong, "\n".join([f"{len(wrong)} cases went wrong: {kinds}", *lines])
    assert total["cases"] == PAIRS
    if IS_FULL or IS_LONG:
        _assert_covered(total)


def _assert_covered(total: Counter[str]) -> None:
    """Check that all that was drawn really happened: all pairs of sizes, all kinds of caches, conversions, refusals."""
    missing = [(p, c) for p in range(1, 9) for c in range(1, 9) if not total[f"tp {p} {c}"]]
    assert not missing, f"no read between these tensor-parallel sizes: {missing}"
    kinds = ("full", "latent", "window", "chunked", "MAMBA2", "GDN_ATTN", "MAMBA1", "LINEAR")
    assert all(total[f"kind {kind}"] > PAIRS / 30 for kind in kinds)
    assert total["read"] > PAIRS
    assert total["stages"] > PAIRS / 20
    assert total["converted"] > PAIRS / 10
    assert total["code fence-mismatch"] > 10
