"""Cache pages that engines with probes wrote down, and what they must hold at an engine of another tensor-parallel size.

The truth is the producer's own pages, sliced and joined again by plain numpy.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fleets import Fleet
from numpy.typing import NDArray

__all__ = ["Rank", "assert_same_pages", "dump_now", "received_since"]

Rank = dict[str, NDArray[Any]]
"""The cache of a rank: `LAYER/NUMBER` -> the tensor, pages along its first axis."""
_WITHIN_S = 60


@dataclass(frozen=True, slots=True)
class Received:
    """A consumer's cache at the moment when a hand-over was there."""

    blocks: list[list[int]]
    ranks: list[Rank]


def dump_now(fleet: Fleet, engine: str, folder: Path, ranks: int) -> list[Rank]:
    """Return an engine's caches as they are now; it takes steps meanwhile, in free blocks."""
    for rank in range(ranks):
        (folder / f"now.{rank}.npz").unlink(missing_ok=True)
        (folder / f"dump.{rank}").touch()
    fleet.ask(engine, {"prompt": "flush", "max_tokens": 1})
    return [_load(folder / f"now.{rank}.npz") for rank in range(ranks)]


def received_since(folder: Path, before: set[Path], ranks: int) -> Received:
    """Return the one hand-over that an engine received since its folder held `before`."""
    (blocks,) = set(folder.glob("*.blocks.json")) - before
    name = blocks.name.removesuffix(".blocks.json")
    return Received(json.loads(blocks.read_bytes()), [_load(folder / f"{name}.{rank}.npz") for rank in range(ranks)])


def _load(path: Path) -> Rank:
    until = time.monotonic() + _WITHIN_S
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} was not written"
        time.sleep(0.05)
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def assert_same_pages(
    groups: dict[str, list[dict[str, Any]]],
    ticket: dict[str, Any],
    producer: list[Rank],
    received: Received,
    tokens: int,
) -> int:
    """Compare, byte for byte, the states and all full pages of the first `tokens` tokens; return how many bytes that were.

    Args:
        groups: The cache groups, as `producer` and `consumer` describe them.
        ticket: Names the producer's blocks.
        producer: Its ranks' caches.
        received: The consumer's.
        tokens: How many tokens were handed over.
    """
    compared = 0
    for number, (theirs, ours) in enumerate(zip(ticket["remote_block_ids"], received.blocks, strict=True)):
        there, here = groups["producer"][number], groups["consumer"][number]
        assert there["layers"] == here["layers"]
        # A state's list ends with the block that holds it; a full page of tokens is at the same place in both lists.
        is_state = bool(here["state_shapes"])
        full = 1 if is_state else tokens // here["block_tokens"]
        pairs = [(theirs[-1], ours[-1])] if is_state else list(zip(theirs, ours, strict=False))[:full]
        assert len(pairs) == full
        for layer, (from_page, to_page) in itertools.product(here["layers"], pairs):
            pages = [rank[f"{layer}/0"][from_page] for rank in producer]
            parts = [_parts(page, there["state_shapes"]) for page in pages]
            for rank, cache in enumerate(received.ranks):
                got = _parts(cache[f"{layer}/0"][to_page], here["state_shapes"])
                want = _state_of(parts, rank, got) if is_state else [_share_of(pages, got[0].shape, rank)]
                for part, (wanted, arrived) in enumerate(zip(want, got, strict=True)):
                    where = f"part {part} of {layer}, page {from_page} -> {to_page} of rank {rank}"
                    assert wanted.tobytes() == arrived.tobytes(), where
                    compared += arrived.nbytes
    return compared


def _parts(page: NDArray[Any], shapes: list[list[int]]) -> list[NDArray[Any]]:
    """Return the parts of a state's page, which vLLM lays out one after the other; the page itself where it holds tokens."""
    if not shapes:
        return [page]
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    values = np.frombuffer(page.tobytes(), np.float32)[: ends[-1]]
    return [part.reshape(shape) for part, shape in zip(np.split(values, ends[:-1]), shapes, strict=True)]


def _state_of(parts: list[list[NDArray[Any]]], rank: int, like: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return a rank's convolution and recurrent state where there is one group of B and C, which every rank has.

    Worked example: 512 rows of heads, then B and C of 32 rows each. Rank 1 of 2 has rows 256 to 511, then all of B and of C.
    """
    heads, size, _ = parts[0][1].shape
    inner = heads * size
    shared = parts[0][0][inner:]
    assert all(convolution[inner:].tobytes() == shared.tobytes() for convolution, _ in parts), "replicas differ"
    own = like[1].shape[0] * size
    rows = np.concatenate([convolution[:inner] for convolution, _ in parts])[rank * own : (rank + 1) * own]
    return [np.concatenate([rows, shared]), _share_of([recurrent for _, recurrent in parts], like[1].shape, rank)]


def _share_of(pages: list[NDArray[Any]], shape: tuple[int, ...], rank: int) -> NDArray[Any]:
    """Return a rank's part of a page that is cut by heads, along the one axis whose lengths differ; else the first rank's.

    Worked example: two producers of (2, 32, 32) each, one consumer of (4, 32, 32): heads 0 and 1 of the first, then those
    of the second. The other way round rank 1 gets heads 2 and 3.
    """
    axes = [axis for axis, (here, there) in enumerate(zip(shape, pages[0].shape, strict=True)) if here != there]
    if not axes:
        return pages[0]
    (axis,) = axes
    whole = np.concatenate(pages, axis=axis)
    length = shape[axis]
    return np.take(whole, range(rank * length, (rank + 1) * length), axis=axis) if length < whole.shape[axis] else whole
