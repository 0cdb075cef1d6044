"""Block lists as vLLM's managers make them, and what a hand-over owes the consumer.

Example: window of 5 tokens, blocks of 2, 11 tokens computed. The next token, 11, sees tokens 7 to 11, so blocks 0 to 2 (tokens 0
to 5) may be null: the list is (0, 0, 0, 8, 4, 6).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from oracle.geometry import Case, Group, Request, Side
from oracle.memory import Array, span_tokens


@dataclass(frozen=True)
class Lists:
    """A request's blocks per group: `ids` all of them, `hits` how many of those in front a prefix hit covers."""

    ids: tuple[tuple[int, ...], ...]
    hits: tuple[int, ...]
    end: int

    @property
    def new(self) -> tuple[tuple[int, ...], ...]:
        """Return the blocks that vLLM calls unhashed: neither covered by a prefix hit nor null."""
        return tuple(tuple(b for b in ids[hit:] if b) for ids, hit in zip(self.ids, self.hits, strict=True))


class Pool:
    """Hands out free blocks of one engine in random order, block 0 never; blocks of all groups come from one pool."""

    def __init__(self, blocks: int, rng: random.Random) -> None:
        self._free = list(range(1, blocks))
        self._rng = rng
        if rng.random() < 0.5:
            rng.shuffle(self._free)

    def take(self, count: int) -> list[int]:
        taken = [self._free.pop() for _ in range(count)]
        return taken[::-1] if self._rng.random() < 0.7 else taken


def first_needed(group: Group, tokens: int) -> int:
    """Return the first token that attention of the token at position `tokens` reaches."""
    if group.kind == "window":
        return max(0, tokens - group.reach + 1)
    return tokens // group.reach * group.reach if group.kind == "chunked" else 0


def _state_list(pool: Pool, side: Side, number: int, rng: random.Random) -> tuple[int, ...]:
    nulls = rng.choice([0, 0, 1, 2])
    return (*(0 for _ in range(nulls)), *pool.take(1 + side.scratch[number]))


def _token_list(case: Case, side: Side, number: int, pool: Pool, end: int, spare: int, part: float) -> tuple[int, ...]:
    group, span = case.model.groups[number], span_tokens(case.model, side, number)
    count = -(-end // span) + (spare if group.kind in {"full", "latent"} or part < 1 else 0)
    nulls = int(first_needed(group, end) // span * part)
    return (*(0 for _ in range(nulls)), *pool.take(count - nulls))


def producer_lists(case: Case, request: Request, pool: Pool, computed: int, rng: random.Random) -> Lists:
    """Return the producer's blocks at the end of a request that computed so many tokens."""
    ids = tuple(
        _state_list(pool, case.producer, number, rng)
        if group.kind == "state"
        else _token_list(case, case.producer, number, pool, computed, request.spare_peer, request.producer_nulls)
        for number, group in enumerate(case.model.groups)
    )
    return Lists(ids, tuple(0 for _ in ids), computed)


def consumer_lists(case: Case, request: Request, pool: Pool, hit: int, end: int, rng: random.Random) -> Lists:
    """Return the consumer's blocks for tokens [0, end), of which a prefix hit covers [0, hit)."""
    ids, hits = [], []
    for number, group in enumerate(case.model.groups):
        if group.kind == "state":
            ids.append(_state_list(pool, case.consumer, number, rng))
            hits.append(0)
            continue
        ids.append(_token_list(case, case.consumer, number, pool, end, request.spare_local, request.consumer_nulls))
        hits.append(hit // span_tokens(case.model, case.consumer, number))
    return Lists(tuple(ids), tuple(hits), end)


def last_tokens(case: Case, prompt: int) -> int:
    """Return the trailing tokens of a prompt that a consumer computes itself.

    One with states, and one where the host, which lays blocks out for the token behind the prompt, keeps none of a token that
    the last one sees.
    """
    for number, group in enumerate(case.model.groups):
        if group.kind == "state":
            return 1
        span = span_tokens(case.model, case.consumer, number)
        if prompt > 1 and first_needed(group, prompt) // span > first_needed(group, prompt - 1) // span:
            return 1
    return 0


def blank_lists(case: Case, end: int) -> Lists:
    """Return the consumer's blocks as its host lays them out for `end` tokens without a prefix hit; any real block is 1."""
    ids: list[tuple[int, ...]] = []
    for number, group in enumerate(case.model.groups):
        span = 1 if group.kind == "state" else span_tokens(case.model, case.consumer, number)
        count, nulls = (1, 0) if group.kind == "state" else (-(-end // span), first_needed(group, end) // span)
        ids.append((*(0 for _ in range(nulls)), *(1 for _ in range(count - nulls))))
    return Lists(tuple(ids), tuple(0 for _ in ids), end)


def owed(case: Case, number: int, lists: Lists, tokens: int) -> tuple[Array, Array]:
    """Return (tokens that must be the producer's, tokens that must be written) of one group after a read up to `tokens`.

    Owed: tokens in real blocks behind the prefix hit, from the block of the first token that the next token reaches; that block
    is owed whole, because a prefix cache keeps it whole. To be written, because the host does not zero the blocks of a read: the
    rest of the ordered blocks, which the window has passed or which lies behind `tokens`. Of a window, the blocks are ordered
    that it touches at most, and no earlier one.
    """
    group, span = case.model.groups[number], span_tokens(case.model, case.consumer, number)
    ids = lists.ids[number]
    covered = np.arange(lists.hits[number] * span, len(ids) * span)
    real = covered[np.asarray([bool(b) for b in ids], bool)[covered // span]] if len(covered) else covered
    # A chunked-local group is a group of all tokens to the planner: its real blocks are owed whole.
    first = first_needed(group, tokens) // span * span if group.kind == "window" else 0
    is_owed = (real >= first) & (real < tokens)
    end = -(-tokens // span) * span
    ordered = end - (-(-group.reach // span) + 1) * span if group.kind == "window" else 0
    return real[is_owed], real[(real >= ordered) & (real < end) & ~is_owed]


def refusal_is_fair(case: Case, theirs: Lists, mine: Lists, tokens: int) -> bool:
    """Return whether the producer lacks something that is owed, so that a coded refusal is the right answer."""
    for number, group in enumerate(case.model.groups):
        if group.kind == "state":
            if theirs.end != tokens:
                return True
            continue
        needed, _ = owed(case, number, mine, tokens)
        span = span_tokens(case.model, case.producer, number)
        ids = theirs.ids[number]
        # A ticket lists the last blocks of a window group only: as many as the window touches, and one more.
        listed = -(-group.reach // span) + 1 if group.kind == "window" else len(ids)
        first = max(0, -(-theirs.end // span) - listed)
        for token in needed.tolist():
            block = token // span
            if token >= theirs.end or not first <= block < len(ids) or not ids[block]:
                return True
    return False
