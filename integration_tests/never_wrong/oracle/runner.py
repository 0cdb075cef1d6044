"""Runs one case and judges every byte: `run(case)` returns how it went or raises `Wrong`."""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hands import Clock, SideChannel

from kv_nixl_agent.testing import FakeFabric
from oracle.blocks import (
    Lists,
    blank_lists,
    consumer_lists,
    first_needed,
    last_tokens,
    owed,
    producer_lists,
    refusal_is_fair,
)
from oracle.engines import LEASE_S, Engine
from oracle.geometry import Case, Request, draw
from oracle.memory import NAN, Array, Content, span_tokens

Router = Callable[[str], str]
"""Carries a ticket's JSON text from one engine to the other."""

_MOST_TURNS = 60


class Wrong(AssertionError):  # noqa: N818  (it reads as what it says)
    """A wrong byte, an order without its end, an uncoded or needless refusal."""


@dataclass
class Outcome:
    """How a case went: requests read, bytes compared, codes of refusals."""

    read: int = 0
    hits: int = 0
    bytes_compared: int = 0
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
    dropped: int
    """Prompt tokens that the producer left to the consumer."""
    mine: Lists | None = None
    tokens: int = 0
    refused: str = ""
    is_hit: bool = False


class Play:
    """A case on stage."""

    def __init__(self, case: Case, *, router: Router | None = None, is_hostile: bool = False) -> None:
        self.case = case
        self.is_hostile = is_hostile  # whether the router changes tickets, which may then be refused
        self.rng = random.Random(case.seed)
        self.router = router or str
        self.ask: dict[str, object] = {"do_remote_decode": True}  # a router's request for a ticket
        self.clock = Clock()
        self.clock.install()
        self.fabric = FakeFabric()
        self.wire = random.Random(case.seed + 1)
        self.most_polls = 2
        if any(request.fate == "blip" for request in case.requests):
            self.fabric.fail_next("check", "nixl-disconnected")
        channel: SideChannel = {}
        world = {"clock": self.clock, "port_factory": self._port, "channel": channel, "rng": self.rng}
        self.producer = Engine("P", 5600, case, case.producer, **world)  # type: ignore[arg-type]
        self.consumer = Engine("D", 5601, case, case.consumer, **world)  # type: ignore[arg-type]
        self.is_expired = any(request.fate == "expired" for request in case.requests)
        if self.is_expired:
            self.most_polls = 8  # long on the wire, so that the lease often ends before the bytes move
        self.outcome = Outcome()
        self.first_id = 1
        self.unreported: set[str] = set()

    def _port(self, *arguments: Any, **named: Any) -> Any:
        """Return an agent's port that keeps every transfer on the wire for another time: ranks of a read end one by one."""
        port: Any = self.fabric.port(*arguments, **named)
        post = port.post

        def timed(transfer: object) -> object:
            self.fabric.latency_polls = self.wire.randint(0, self.most_polls)
            return post(transfer)

        port.post = timed
        return port

    def run(self) -> Outcome:
        made = [self.prefill(number, request) for number, request in enumerate(self.case.requests)]
        handovers = [handover for handover in made if handover is not None]
        self.producer.step()
        before = [data.copy() for data in self.consumer.data()]
        self.rng.shuffle(handovers)
        for handover in handovers:
            self.decode(handover)
        self.consumer.step()
        self.play_out(handovers)
        self.judge(handovers, before)
        self.outcome.pages_converted = self.consumer.pages_converted
        return self.outcome

    # ------------------------------------------------------------------------------------------------- producer

    def prefill(self, number: int, request: Request) -> _Handover | None:
        case, engine, source = self.case, self.producer, f"p{number}"
        prompt = [self.rng.randrange(1000) for _ in range(request.prompt)]
        asked = list(prompt)
        refused, dropped = engine.arrive(source, self.ask, asked)
        assert not refused
        computed = request.prompt - dropped + request.further
        theirs = producer_lists(case, request, engine.pool, computed + request.in_flight, self.rng)
        content = Content(case.model, case.most_tokens, self.first_id)
        self.first_id += 1 << 22
        engine.allocate(source, theirs, 0)
        engine.step()
        engine.compute(content, theirs)
        ticket, withheld = engine.finish(source, theirs, computed, asked, request.in_flight)
        if ticket is None:
            # A state that went on cannot be set back; nothing else keeps a finished prompt from being handed over.
            if not withheld or not (case.has_state and (request.further or request.in_flight)):
                raise Wrong(f"{source} is not handed over: {withheld or 'uncoded'}")
            self.outcome.codes[withheld] += 1
            return None
        ticket = json.loads(self.router(json.dumps(ticket)))
        return _Handover(request, source, f"d{number}", content, theirs, prompt, ticket, dropped)

    # ------------------------------------------------------------------------------------------------- consumer

    def decode(self, handover: _Handover) -> None:
        case, engine, request = self.case, self.consumer, handover.request
        if request.fate == "foreign":
            other = self.rng.randrange(len(handover.prompt) - handover.dropped)
            handover.prompt[other] += 1000
        handover.refused, _ = engine.arrive(handover.reader, handover.ticket, handover.prompt)
        spans = [
            span_tokens(case.model, case.consumer, n) for n, g in enumerate(case.model.groups) if g.kind != "state"
        ]
        hit = request.hit_blocks * math.lcm(*spans) if spans else 0
        external = engine.external_tokens(handover.reader, hit)
        assert external is not None
        handover.tokens = hit + external
        # The host lays blocks out for the token behind those that it has, or loads.
        end = handover.tokens if external else request.prompt
        handover.mine = consumer_lists(case, request, engine.pool, hit, end, self.rng)
        handover.is_hit = not external
        if not (handover.refused and self.rng.random() < 0.5):
            engine.allocate(handover.reader, handover.mine, external)

    def play_out(self, handovers: list[_Handover]) -> None:
        """Turn all ranks' threads in random order until every read has ended and every lease is over."""
        wanted = {h.reader for h in handovers if not h.is_hit}
        leases = {h.source for h in handovers}
        expires_at = self.rng.randint(0, 5) if self.is_expired else -1
        threads = [*self.producer.threads, *self.consumer.threads]
        for turn in range(_MOST_TURNS):
            if turn == expires_at:
                self._pass(LEASE_S + 1)
                self._collect(handovers)
            for thread in self.rng.sample(threads, len(threads)):
                thread.turn()
                if self.rng.random() < 0.5:
                    thread.tick()
            self._collect(handovers)
            if wanted <= self.consumer.received.keys() and leases <= self.producer.sent:
                return
            if turn == _MOST_TURNS // 2:
                self.unreported = leases - self.producer.sent
                self._pass(LEASE_S + 1)  # a lease that nobody ends by a completion expires
        missing = wanted - self.consumer.received.keys(), leases - self.producer.sent
        raise Wrong(f"without an end: reads {sorted(missing[0])}, leases {sorted(missing[1])}")

    def _pass(self, seconds: float) -> None:
        """Let time pass second by second while the producer's timers run and nobody renews a lease."""
        for _ in range(math.ceil(seconds)):
            self.clock.advance(1.0)
            for thread in self.producer.threads:
                thread.tick()

    def _collect(self, handovers: list[_Handover]) -> None:
        known, ended = set(self.producer.sent), set(self.consumer.received)
        self.producer.collect()
        self.consumer.collect()
        for handover in handovers:
            if handover.reader in self.consumer.received.keys() - ended:
                # The next forward pass may already see these blocks, while those of other reads are still written.
                now = [data.copy() for data in self.consumer.data()]
                self._judge_bytes([handover], before=now, after=now)
        for handover in handovers:
            if handover.source in self.producer.sent - known:
                self._reuse(handover)
        if self.rng.random() < 0.2:
            self.consumer.step()
            self.producer.step()

    def _reuse(self, handover: _Handover) -> None:
        """Let another request compute in the blocks that have just become free."""
        other = Content(self.case.model, self.case.most_tokens, self.first_id)
        self.first_id += 1 << 22
        self.producer.compute(other, handover.theirs)

    # ---------------------------------------------------------------------------------------------------- judge

    def judge(self, handovers: list[_Handover], before: list[Array]) -> None:
        self._judge_bytes(handovers, before, self.consumer.data())
        self.outcome.bytes_compared += sum(len(data) for data in before)
        for handover in handovers:
            self._judge_end(handover)

    def _judge_bytes(self, handovers: list[_Handover], before: list[Array], after: list[Array]) -> None:
        for rank, memory in enumerate(self.consumer.memories):
            data, expected = after[rank], before[rank].copy()
            is_free, is_filled = np.zeros(len(expected), bool), np.zeros(len(expected), bool)
            for handover in handovers:
                self._expect(handover, memory, expected, is_free, is_filled)
            is_wrong = np.where(is_filled, data == NAN, data != expected) & ~is_free
            if is_wrong.any():
                raise Wrong(self._where(rank, is_wrong))

    def _expect(self, handover: _Handover, memory, expected: Array, is_free: Array, is_filled: Array) -> None:
        lists = handover.mine
        if lists is None or handover.is_hit:
            return
        failed = self.consumer.received.get(handover.reader, "")
        for number, group in enumerate(self.case.model.groups):
            ids = lists.ids[number]
            if group.kind == "state":
                blocks, tokens, filled = [ids[-1 - self.case.consumer.scratch[number]]], np.arange(0), None
            else:
                tokens, filled = owed(self.case, number, lists, handover.tokens)
                blocks = list(ids)

            def places(which: Array, number: int = number, blocks: list[int] = blocks) -> Array:
                shadow = np.zeros(len(expected), np.uint8)
                memory.write(shadow, handover.content, number, blocks, which, ones=True)
                return shadow != 0

            if failed:  # the ordered pages may hold anything; all else must be as it was
                is_free |= places(np.union1d(tokens, filled) if filled is not None else tokens)
                continue
            memory.write(expected, handover.content, number, blocks, tokens)
            if filled is not None and len(filled):
                is_filled |= places(filled)

    def _judge_end(self, handover: _Handover) -> None:
        code = handover.refused or self.consumer.received.get(handover.reader, "")
        assert handover.mine is not None
        if handover.request.fate == "foreign":
            if handover.refused != "ticket-prompt":
                raise Wrong(
                    f"{handover.reader} comes with another prompt's ticket, and that is no reason to refuse it: {code!r}"
                )
            self.outcome.codes[code] += 1
            return
        # Told to convert all pages, a consumer finds no plan for some producers, and without a plan it cannot tell them either.
        is_met = self.case.consumer.conversion != "always"
        if not code and handover.source in self.unreported and not self.is_expired and is_met:
            raise Wrong(f"{handover.source} was read, and kept its blocks until its lease ended")
        if handover.is_hit and not code:
            self.outcome.hits += 1
            ends = len(handover.prompt) - last_tokens(self.case, len(handover.prompt))
            # The machine decides at arrival, before it knows of a prefix hit.
            without_hit = blank_lists(self.case, ends)
            is_fair = self._may_keep_holes() or refusal_is_fair(self.case, handover.theirs, without_hit, ends)
            if handover.tokens < ends and not is_fair:
                raise Wrong(f"{handover.reader} is computed locally, for no reason")
            return
        if not code:
            self.outcome.read += 1
            self._judge_first_token(handover, handover.mine)
            return
        self.outcome.codes[code] += 1
        if "uncoded" in code or not all(part and part == part.lower() for part in code.split(",")):
            raise Wrong(f"{handover.reader} ended with the code {code!r}")
        assert handover.mine is not None
        if code == "not-stageable" and self.case.consumer.conversion == "always":
            return  # asked to convert all pages, also those that cannot be read whole
        is_asked_for = self.is_expired or self.is_hostile
        if not is_asked_for and not refusal_is_fair(self.case, handover.theirs, handover.mine, handover.tokens):
            raise Wrong(f"{handover.reader} is refused for no reason: {code}")

    def _judge_first_token(self, handover: _Handover, mine: Lists) -> None:
        """Refuse a read after which the first token to be computed, the last one if all were read, does not see all it should."""
        first = min(handover.tokens, len(handover.prompt) - 1)
        for number, group in enumerate(self.case.model.groups):
            if group.kind != "state":
                span = span_tokens(self.case.model, self.case.consumer, number)
                unseen = [t for t in range(first_needed(group, first), first) if not mine.ids[number][t // span]]
                if unseen:
                    raise Wrong(f"{handover.reader}: token {first} sees {unseen} of group {number} in no block")

    def _may_keep_holes(self) -> bool:
        """Return whether the first local block of a window may be larger than what the peer lists of it.

        The machine decides at arrival, when it does not know yet which local blocks will be real: it computes such a prompt here.
        """
        case = self.case
        return any(
            group.kind == "window"
            and span_tokens(case.model, case.producer, number) != span_tokens(case.model, case.consumer, number)
            for number, group in enumerate(case.model.groups)
        )

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
                        f"rank {rank}: {int(is_wrong.sum())} wrong bytes, the first in page {page} of {cache.layer} "
                        f"({group.kind}), byte {int(part.argmax())}"
                    )
        return f"rank {rank}: {int(is_wrong.sum())} wrong bytes, outside all pages"


def run(case: Case, *, router: Router | None = None, is_hostile: bool = False) -> Outcome:
    """Play a case; raise `Wrong` if it went wrong."""
    return Play(case, router=router, is_hostile=is_hostile).run()


def try_seed(seed: int) -> tuple[Outcome, str]:
    """Run the case of a seed; return its outcome and, if it went wrong, why."""
    logging.disable(logging.CRITICAL)
    play = Play(draw(seed))
    try:
        return play.run(), ""
    except Exception as error:
        return play.outcome, f"{type(error).__name__}: {error}"
