"""Runs one case and judges every byte: `run(case)` returns how it went or raises `Wrong`."""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from blocks import Lists, consumer_lists, owed, producer_lists, refusal_is_fair
from engines import Engine, LEASE_S
from fabric import Fabric
from geometry import Case, Request, draw, shrink
from hands import Clock, SideChannel
from memory import Array, Content, span_tokens

__all__ = ["Outcome", "Router", "Wrong", "explain", "run", "try_seed", "try_threads"]

Router = Callable[[str], str]
"""Carries a ticket's JSON text from one engine to the other."""

_MOST_TURNS = 60
_CONTENT_TOKENS = 160


class Wrong(AssertionError):
    """A wrong byte, an order without its end, an uncoded or needless refusal."""


@dataclass
class Outcome:
    """How a case went: requests read, bytes compared, codes of refusals."""

    read: int = 0
    hits: int = 0
    bytes_compared: int = 0
    bytes_moved: int = 0
    pages_converted: int = 0
    codes: Counter[str] = field(default_factory=Counter)


@dataclass
class _Handover:
    request: Request
    source: str
    reader: str
    content: Content
    theirs: Lists
    prompt: list[int]
    ticket: dict[str, object]
    mine: Lists | None = None
    tokens: int = 0
    refused: str = ""
    is_hit: bool = False


class _Play:
    """One case on stage."""

    def __init__(self, case: Case, *, router: Router | None = None, is_threaded: bool = False) -> None:
        self.case = case
        self.rng = random.Random(case.seed)
        self.router = router or str
        self.is_threaded = is_threaded
        self.clock = Clock(is_real=is_threaded)
        self.clock.install()
        self.fabric = Fabric(random.Random(case.seed + 1))
        channel = SideChannel()
        common = {"clock": self.clock, "fabric": self.fabric, "channel": channel, "rng": self.rng, "is_threaded": is_threaded}
        self.producer = Engine("P", 5600, case.model, case.producer, **common)  # type: ignore[arg-type]
        self.consumer = Engine("D", 5601, case.model, case.consumer, **common)  # type: ignore[arg-type]
        self.is_expired = any(request.fate == "expired" for request in case.requests)
        self.outcome = Outcome()
        self.first_id = 1

    def run(self) -> Outcome:
        handovers = [self._prefill(number, request) for number, request in enumerate(self.case.requests)]
        self.producer.step()
        before = [data.copy() for data in self.consumer.data()]
        self.rng.shuffle(handovers)
        for handover in handovers:
            self._decode(handover)
        self.consumer.step()
        self._play_out(handovers)
        self._judge(handovers, before)
        self.outcome.bytes_moved = self.fabric.bytes_moved
        self.outcome.pages_converted = self.consumer.pages_converted
        return self.outcome

    def close(self) -> None:
        for worker in (*self.consumer.workers, *self.producer.workers):
            worker.close()

    # ------------------------------------------------------------------------------------------------- producer

    def _prefill(self, number: int, request: Request) -> _Handover:
        case, engine, source = self.case, self.producer, f"p{number}"
        prompt = [self.rng.randrange(1000) for _ in range(request.prompt)]
        refused, dropped = engine.arrive(source, {"do_remote_decode": True}, prompt)
        assert not refused
        computed = request.prompt - dropped + request.further
        theirs = producer_lists(case, request, engine.pool, computed, self.rng)
        content = Content(case.model, _CONTENT_TOKENS, self.first_id)
        self.first_id += 1 << 22
        engine.allocate(source, theirs, 0)
        engine.step()
        engine.compute(content, theirs)
        ticket = engine.finish(source, theirs, computed)
        if ticket is None:
            raise Wrong(f"{source} is not handed over")
        ticket = json.loads(self.router(json.dumps(ticket)))
        return _Handover(request, source, f"d{number}", content, theirs, prompt, ticket)

    # ------------------------------------------------------------------------------------------------- consumer

    def _decode(self, handover: _Handover) -> None:
        case, engine, request = self.case, self.consumer, handover.request
        handover.refused, _ = engine.arrive(handover.reader, handover.ticket, handover.prompt)
        spans = [span_tokens(case.model, case.consumer, n) for n, g in enumerate(case.model.groups) if g.kind != "state"]
        hit = request.hit_blocks * math.lcm(*spans) if spans else 0
        external = engine.external_tokens(handover.reader, hit)
        handover.tokens = hit + external
        handover.mine = consumer_lists(case, request, engine.pool, hit, max(handover.tokens, request.prompt), self.rng)
        handover.is_hit = not external
        if not (handover.refused and self.rng.random() < 0.5):
            engine.allocate(handover.reader, handover.mine, external)

    def _play_out(self, handovers: list[_Handover]) -> None:
        """Turn all ranks' threads in random order until every read has ended and every lease is over."""
        wanted = {h.reader for h in handovers if not h.is_hit}
        leases = {h.source for h in handovers}
        expires_at = self.rng.randint(0, 12) if self.is_expired else -1
        threads = [*self.producer.threads, *self.consumer.threads]
        for turn in range(_MOST_TURNS * (50 if self.is_threaded else 1)):
            if turn == expires_at and not self.is_threaded:
                self._pass(LEASE_S + 1)
            if self.is_threaded:
                time.sleep(0.002)
            else:
                for thread in self.rng.sample(threads, len(threads)):
                    thread.turn()
                    if self.rng.random() < 0.5:
                        thread.tick()
            self._collect(handovers)
            if wanted <= self.consumer.received.keys() and leases <= self.producer.sent:
                return
            if turn == _MOST_TURNS // 2 and not self.is_threaded:
                self._pass(LEASE_S + 1)  # what nobody reads, or could not be told, ends by its lease
        missing = wanted - self.consumer.received.keys(), leases - self.producer.sent
        raise Wrong(f"without an end: reads {sorted(missing[0])}, leases {sorted(missing[1])}")

    def _pass(self, seconds: float) -> None:
        """Let time pass second by second while the producer's timers run and nobody renews a lease."""
        for _ in range(math.ceil(seconds)):
            self.clock.advance(1.0)
            for thread in self.producer.threads:
                thread.tick()

    def _collect(self, handovers: list[_Handover]) -> None:
        known = set(self.producer.sent)
        self.producer.collect()
        self.consumer.collect()
        for handover in handovers:
            if handover.source in self.producer.sent - known:
                self._reuse(handover)
        if self.rng.random() < 0.2:
            self.consumer.step()
            self.producer.step()

    def _reuse(self, handover: _Handover) -> None:
        """Let another request compute in the blocks that have just become free."""
        other = Content(self.case.model, _CONTENT_TOKENS, self.first_id)
        self.first_id += 1 << 22
        self.producer.compute(other, handover.theirs)

    # ---------------------------------------------------------------------------------------------------- judge

    def _judge(self, handovers: list[_Handover], before: list[Array]) -> None:
        for rank, memory in enumerate(self.consumer.memories):
            expected = before[rank].copy()
            other, may_differ = expected.copy(), np.zeros(len(expected), np.uint8)
            for handover in handovers:
                self._expect(handover, memory, expected, other, may_differ)
            is_wrong = (memory.data != expected) & ~((may_differ == 255) & (memory.data == other)) & (may_differ != 1)
            self.outcome.bytes_compared += len(expected)
            if is_wrong.any():
                raise Wrong(self._where(rank, is_wrong))
        for handover in handovers:
            self._judge_end(handover)

    def _expect(self, handover: _Handover, memory, expected: Array, other: Array, may_differ: Array) -> None:
        lists = handover.mine
        if lists is None or handover.is_hit:
            return
        failed = self.consumer.received.get(handover.reader, "")
        for number, group in enumerate(self.case.model.groups):
            ids = lists.ids[number]
            if group.kind == "state":
                blocks, tokens, either = [ids[-1 - self.case.consumer.scratch[number]]], np.arange(0), None
            else:
                tokens, either = owed(self.case, number, lists, handover.tokens)
                blocks = list(ids)
            if failed:  # what was ordered may hold anything; all else must be as it was
                touched = np.union1d(tokens, either) if either is not None else tokens
                shadow = np.zeros(len(expected), np.uint8)
                memory.write(shadow, handover.content, number, blocks, touched, ones=True)
                may_differ[shadow != 0] = 1
                continue
            memory.write(expected, handover.content, number, blocks, tokens)
            if either is not None and len(either):
                memory.write(other, handover.content, number, blocks, either)
                memory.write(may_differ, handover.content, number, blocks, either, ones=True)

    def _judge_end(self, handover: _Handover) -> None:
        code = handover.refused or self.consumer.received.get(handover.reader, "")
        if handover.is_hit and not code:
            self.outcome.hits += 1
            return
        if not code:
            self.outcome.read += 1
            return
        self.outcome.codes[code] += 1
        if "uncoded" in code or not all(part and part == part.lower() for part in code.split(",")):
            raise Wrong(f"{handover.reader} ended with the code {code!r}")
        assert handover.mine is not None
        if not self.is_expired and not refusal_is_fair(self.case, handover.theirs, handover.mine, handover.tokens):
            raise Wrong(f"{handover.reader} is refused for no reason: {code}")

    def _where(self, rank: int, is_wrong: Array) -> str:
        memory = self.consumer.memories[rank]
        for cache in memory.caches:
            group = self.case.model.groups[cache.group]
            at = cache.address - memory.base
            stride = cache.stride_bytes[0]
            for page in range(cache.shape[0]):
                part = is_wrong[at + page * stride : at + page * stride + min(stride, cache.page_bytes)]
                if part.any():
                    return (
                        f"rank {rank}: {int(is_wrong.sum())} wrong bytes, the first in page {page} of {cache.layer} ({group.kind}), "
                        f"byte {int(part.argmax())}"
                    )
        return f"rank {rank}: {int(is_wrong.sum())} wrong bytes, outside all pages"


def run(case: Case, *, router: Router | None = None) -> Outcome:
    """Play a case; raise `Wrong` if it went wrong."""
    return _Play(case, router=router).run()


def failure(case: Case) -> str:
    """Return what is wrong with a case, "" for nothing; a case that cannot be set up is not wrong."""
    try:
        play = _Play(case)
    except Exception:
        return ""
    try:
        play.run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def try_seed(seed: int) -> tuple[Outcome, str]:
    """Run the case of a seed; return its outcome and, if it went wrong, why."""
    logging.disable(logging.CRITICAL)
    play = _Play(draw(seed))
    try:
        return play.run(), ""
    except Exception as error:
        return play.outcome, f"{type(error).__name__}: {error}"


def try_threads(seed: int) -> tuple[Outcome, str]:
    """Run the case of a seed with real transfer threads and real time; no lease expires in these."""
    logging.disable(logging.CRITICAL)
    case = draw(seed)
    case = replace(case, requests=tuple(replace(request, fate="") for request in case.requests))
    play = _Play(case, is_threaded=True)
    try:
        return play.run(), ""
    except Exception as error:
        return play.outcome, f"{type(error).__name__}: {error}"
    finally:
        play.close()


def explain(seed: int) -> str:
    """Shrink a failing seed and return one line that reproduces it."""
    small = shrink(draw(seed), lambda case: bool(failure(case)))
    return f"seed {seed}: {failure(small) or try_seed(seed)[1]}\n  .venv/bin/python integration_tests/never_wrong/replay.py '{small!r}'"
