"""Prefix hits of different lengths in the groups of one model: every unfilled block is read.

Truth: vLLM's own block table. A real block of a request without a hash holds nothing yet, so the read must fill it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine import BLOCK, CACHED_STATE, FULL, WINDOW, ids, prompt
from seeds import IS_FULL
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import MambaSpec

WIDE = replace(FULL, block_size=2 * BLOCK)
OTHER = replace(FULL, dtype=torch.float16)
MIXES = {
    "state-full": (CACHED_STATE, FULL),
    "state-state-full": (CACHED_STATE, CACHED_STATE, FULL),
    "state-window-full": (CACHED_STATE, WINDOW, FULL),
    "full-state-window": (FULL, CACHED_STATE, WINDOW),
    "state-full-full": (CACHED_STATE, FULL, OTHER),
    "state-full-wide": (CACHED_STATE, FULL, WIDE),
    "window-full": (WINDOW, FULL),
    "full": (FULL,),
}
COMMON = 4 * BLOCK
TOKENS = 8 * BLOCK + 5


@pytest.mark.proves("windows: prefix hits")
@pytest.mark.never_wrong("A10")
@pytest.mark.parametrize("is_drafted", [False, True], ids=["", "drafter"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_read_fills_every_block_that_no_hit_covers(make_engine: Any, mix: str, is_drafted: bool) -> None:
    """Blocks of each group are evicted at random, so that the groups' hits end at different tokens."""
    for seed in range(8 if IS_FULL else 2):
        assert_filled(make_engine, mix, seed, is_drafted)


def assert_filled(make_engine: Any, mix: str, seed: int, is_drafted: bool) -> None:
    draw = random.Random(f"{mix}/{seed}")
    specs = MIXES[mix]
    options: dict[str, Any] = {"specs": specs, "is_last_a_drafters": is_drafted}
    options["mamba_cache_mode"] = "align" if CACHED_STATE in specs else "none"
    producer, consumer = make_engine("P", **options), make_engine("D", **options)
    consumer.add("warm", prompt(TOKENS - BLOCK), max_tokens=1)
    for _ in range(16):
        if not consumer.scheduler.has_requests():
            break
        consumer.step()
    pool = consumer.scheduler.kv_cache_manager.block_pool
    for group in range(len(specs)):
        share = draw.choice([0, 0.3, 1] if specs[group] != FULL else [0, 0, 0.3])
        pool.evict_blocks({block for block in _cached(pool, group) if draw.random() < share})
    tokens = prompt(COMMON) + prompt(draw.choice([5, BLOCK + 5, TOKENS - COMMON]), seed=3)
    consumer.take_over(producer, tokens)
    (read,) = consumer.reads
    table = consumer.scheduler.kv_cache_manager.get_blocks("d").blocks
    for spec, held, local in zip(specs, table, read.local_blocks, strict=True):
        # A state has one running block; the others are real only where a hit covers them.
        behind = 0 if isinstance(spec, MambaSpec) else len(held) - -(-read.tokens // spec.block_size)
        empty = [b.block_id for b in held[: len(held) - behind] if not b.is_null and b.block_hash is None]
        unread = set(empty) - set(local.ids)
        assert not unread, f"{type(spec).__name__}: {unread} of {[b.block_id for b in held]} hold nothing"
    assert any(ids(read.local_blocks))


def _cached(pool: Any, group: int) -> set[int]:
    """Return a group's blocks in the prefix cache."""
    hashed = [block for block in pool.blocks if block.block_hash is not None]
    return {block.block_id for block in hashed if get_group_id(block.block_hash) == group}
