"""Streams that start, advance and are voided at random, with contents that reveal a torn read; for tests.

The tag determines every acceptable value: the id of entry 5 under tag 9 is `entry_id(9, 5)`, and progress under tag 9 is 0,
void, or a number that ends in 009.
"""

from __future__ import annotations

import random
import time
from typing import Final

from kv_nixl_agent.streams.words import StreamWords
from kv_nixl_agent.tools.producer import Producer

VOID_TOKENS: Final = (1 << 32) - 1
_MOST_ENTRIES: Final = 1300
"""More entries than one read of a table takes."""


def entry_id(tag: int, entry: int) -> int:
    """Return the id of a table's entry."""
    return (tag * 2654435761 + entry * 40503) % ((1 << 32) - 1)


def entries_of(tokens: int) -> int:
    """Return the number of entries that a progress value covers. Example: 4 for 4009."""
    return tokens // 1000


def is_progress_of(tag: int, tokens: int) -> bool:
    """Return whether a progress value is valid under a tag."""
    return tokens in {0, VOID_TOKENS} or tokens % 1000 == tag % 1000


class StreamRewriter:
    """Rewrites the words of all slots, one stream after the other, pausing only for short rests."""

    def __init__(self, words: StreamWords, slots: int, seed: int) -> None:
        self._words = words
        self._slots = slots
        self._random = random.Random(seed)
        self.begun = 0
        """Number of streams begun, and the latest generation."""
        self._running: dict[int, int] = {}

    def step(self) -> None:
        """Void the stream of one slot, begin another, and advance it by some chunks."""
        slot = self._random.randrange(self._slots)
        former = self._running.get(slot)
        if former is not None and self._random.random() < 0.7:  # a restart may come without a void
            self._words.void(slot, former | 1 << 63, former)
        self.begun += 1
        tag = self._running[slot] = self.begun
        self._words.open(slot, tag, tag)
        entries = 0
        for _ in range(self._random.randrange(6)):
            first, entries = entries, min(entries + self._random.choice((1, 7, 64, 500)), _MOST_ENTRIES)
            self._words.put(slot, tag, first, [entry_id(tag, entry) for entry in range(first, entries)])
            self._words.show(slot, tag, entries * 1000 + tag % 1000)
            if self._random.random() < 0.3:
                time.sleep(self._random.random() * 2e-3)


def call_stream(producer: Producer, method: str, *arguments: object) -> None:
    """Call a method of a producer's stream words."""
    getattr(producer.thread.stream_words, method)(*arguments)


def close_agent(producer: Producer) -> None:
    """Close a producer's agent in order, and leave its process alive."""
    producer.thread.close()


def rewrite_streams(producer: Producer, duration_s: float, seed: int, begun: int) -> int:
    """Restart streams in all slots of a producer, over and over; return how many there were."""
    words = producer.thread.stream_words
    return 0 if words is None else rewrite_words(words, duration_s, seed, begun)


def rewrite_words(words: StreamWords, duration_s: float, seed: int, begun: int) -> int:
    """Restart streams in all slots, over and over; return how many there were, with those begun before."""
    rewriter = StreamRewriter(words, words.location[2], seed)
    rewriter.begun = begun
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        rewriter.step()
    return rewriter.begun
