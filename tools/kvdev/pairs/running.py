"""Carry a plan out: start the engines of each setting, let the pairs take turns, and keep every answer to be compared."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from kvdev.pairs import loading, measures
from kvdev.pairs.asking import Answer, ask_all, hand_overs_ms, made_prompt, steps_ms
from kvdev.pairs.figures import Book
from kvdev.pairs.fleet import Fleet, Pair, started_fleet
from kvdev.pairs.kinds import ALONE
from kvdev.pairs.plan import BLOCK_TOKENS, Case, Plan, Pool, Setting, last_step_tokens, left_tokens
from kvdev.steps import DevError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvdev.forked import Starter

__all__ = ["Exam", "carry_out"]

_CONTACT = Case(256, 1, "fresh")
_FRAGMENTED_SHARE = 0.7
"""Of a cache's blocks that are in use at once when its order is shuffled."""


@final
@dataclass
class Exam:
    """Answers that were given to prompts, to be compared with those of one engine alone."""

    prompts: dict[str, Sequence[list[int]]] = field(default_factory=dict)
    given: list[tuple[str, str, Case, list[str]]] = field(default_factory=list)

    def note(self, seed: str, kind: str, case: Case, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> None:
        """Note what a kind of pair answered to the prompts of a seed."""
        self.prompts[seed] = prompts
        self.given.append((seed, kind, case, [answer.text for answer in answers]))

    def judge(self, book: Book, setting: Setting, right: Callable[[Sequence[list[int]]], Sequence[str]]) -> list[str]:
        """Ask for the right answers, count those that differ, and forget all; returns the differences in words."""
        texts = {seed: right(prompts) for seed, prompts in self.prompts.items()}
        differences: list[str] = []
        for seed, kind, case, given in self.given:
            wrong = [(mine, due) for mine, due in zip(given, texts[seed], strict=True) if mine != due]
            book.add("wrong answers", kind, setting, case, *[float(n < len(wrong)) for n in range(len(given))])
            differences += [f"{kind}, {case}: {mine!r}, alone {due!r}" for mine, due in wrong]
        self.prompts.clear()
        self.given.clear()
        return differences


def carry_out(plan: Plan, starter: Starter, python: Path, model: Path, report: Callable[[str], None]) -> Book:
    """Measure all settings of a plan."""
    book = Book()
    for setting in plan.settings:
        for start in range(plan.starts):
            began_s = time.monotonic()
            with started_fleet(starter, python, model, setting, plan) as fleet:
                report(
                    f"{setting}, start {start + 1} of {plan.starts}: engines are up ({time.monotonic() - began_s:.0f} s)"
                )
                _Run(plan, setting, fleet, book, f"{setting.transport} {setting.chunk} {start}", report).all()
            report(f"{setting}, start {start + 1} of {plan.starts}: measured ({time.monotonic() - began_s:.0f} s)")
    return book


@final
@dataclass
class _Run:
    """Measurements of one start of the engines."""

    plan: Plan
    setting: Setting
    fleet: Fleet
    book: Book
    seed: str
    report: Callable[[str], None]
    exam: Exam = field(default_factory=Exam)

    def all(self) -> None:
        """Take every measure; pools are shuffled at the last."""
        self._contacts()
        self._pool("fresh")
        self._pairs()
        for round_number in range(self.plan.engine_rounds):
            self._engines(round_number)
        if any(case.pool == "fragmented" for case in self.plan.cases):
            self._shuffle()
            self._pool("fragmented")

    # ------------------------------------------------------------------------------------------------------ hand-overs

    def _contacts(self) -> None:
        prompts = [made_prompt(f"{self.seed} contact", _CONTACT.tokens)]
        for kind, pair in self.fleet.pairs.items():
            self.fleet.turns.only(kind)
            for engine in (pair.prefill, pair.decode):  # an engine's own first steps, whoever its peer is
                asyncio.run(ask_all(engine.url, [made_prompt(f"{self.seed} warm {engine.spec.name}", _CONTACT.tokens)]))
            answers = measures.hand_over(pair, prompts)
            self.book.add("first contact", kind, self.setting, None, *hand_overs_ms(answers))
            self.exam.note("contact", kind, _CONTACT, prompts, answers)
        self._judge()

    def _pool(self, pool: Pool) -> None:
        last = -1
        for round_number, case, kind in self.plan.steps(pool):
            if round_number != last and last >= 0:
                self._judge()
            last = round_number
            self._case(round_number, case, kind)
        self._judge()

    def _pairs(self) -> None:
        """Hand over the longest new prompt some more times, plain and streamed alone, for the time that streaming saves."""
        case = Case(self.plan.longest, 1, "fresh")
        kinds = [kind for kind in ("ours", "streamed") if kind in self.plan.kinds]
        if len(kinds) < 2 or case not in self.plan.cases:
            return
        for number in range(self.plan.pair_rounds):
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                self._case(self.plan.rounds + number, case, kind)
            self._judge()

    def _case(self, round_number: int, case: Case, kind: str) -> None:
        seed = f"{self.seed} {round_number} {case}"
        prompts = [made_prompt(f"{seed} {number}", case.tokens) for number in range(case.at_once)]
        pair = self._turn_of(kind)
        if case.prefix == "held":
            held = case.tokens - left_tokens(case.tokens)
            measures.hold_prefix(pair.prefill, [prompt[:held] for prompt in prompts])
        before = measures.counts_of(pair.decode)
        answers = measures.hand_over(pair, prompts)
        after = measures.counts_of(pair.decode)
        note = self.book.add
        note("recomputed", kind, self.setting, case, after.recomputed - before.recomputed)
        if overs_ms := hand_overs_ms(answers):
            note("hand-over", kind, self.setting, case, statistics.median(overs_ms))
        note("first token", kind, self.setting, case, statistics.median(answer.first_token_ms for answer in answers))
        if gaps_ms := steps_ms(answers):
            note("decode step", kind, self.setting, case, statistics.median(gaps_ms))
        if pair.early:
            early = measures.early_share(before, after, case.tokens * case.at_once)
            note("early bytes", kind, self.setting, case, early)
        self.exam.note(seed, kind, case, prompts, answers)

    def _shuffle(self) -> None:
        blocks = int(_FRAGMENTED_SHARE * self.plan.pool_tokens / BLOCK_TOKENS)
        for kind, pair in self.fleet.pairs.items():
            self.fleet.turns.only(kind)
            for engine in (pair.prefill, pair.decode):
                loading.fragment(engine, blocks)

    # --------------------------------------------------------------------------------------------------------- engines

    def _engines(self, round_number: int) -> None:
        """Measure each pair under prefills, at rest, and beside other requests; the engine alone takes its turn at prefills."""
        case = Case(self.plan.longest, 1, "fresh")
        seed = f"{self.seed} engines {round_number}"
        timed = [made_prompt(f"{seed} {number}", case.tokens) for number in range(self.plan.prompts_of_a_rate)]
        turns = [*self.plan.turns(0), ALONE]
        for kind in turns if round_number % 2 == 0 else reversed(turns):
            self.fleet.turns.only(kind)
            pair = self.fleet.pairs.get(kind)
            engine = pair.prefill if pair else self.fleet.alone
            rate = asyncio.run(loading.prefill_rate(engine, pair, timed))
            self.book.add("prefill throughput", kind, self.setting, case, rate)
            if not pair:
                shares = measures.rest_shares([engine], self.plan.idle_s)
                self.book.add("worker at rest", ALONE, self.setting, None, *(100 * each for each in shares))
            else:
                try:
                    self._pair(kind, pair, case, seed)
                except DevError as error:  # figures of this pair alone are missing
                    self.report(f"not measured, {kind}: {error}")
        self._judge()

    def _pair(self, kind: str, pair: Pair, case: Case, seed: str) -> None:
        note, prompts = self.book.add, [made_prompt(f"{seed} {part}", case.tokens) for part in ("gap", "held")]
        beside = [made_prompt(f"{seed} {part} beside", 64) for part in ("gap", "held", "prefill")]
        note(
            "worker at rest",
            kind,
            self.setting,
            None,
            *(100 * each for each in measures.rest_shares([pair.prefill, pair.decode], self.plan.idle_s)),
        )
        if kind == "ours":
            last = made_prompt(f"{seed} last", last_step_tokens(case.tokens, self.setting.chunk))
            note("last read", kind, self.setting, case, measures.last_read_ms(pair, last))
        gaps = asyncio.run(measures.gaps_beside_a_read(pair, prompts[0], beside[0]))
        measures.wait_idle(pair.decode)
        held_ms, answer = asyncio.run(measures.held_ms(pair, prompts[1], beside[1]))
        measures.wait_idle(pair.prefill)
        note("worst gap", kind, self.setting, case, gaps.worst)
        note("usual gap", kind, self.setting, case, gaps.usual)
        note("blocks held", kind, self.setting, case, held_ms)
        self.exam.note(seed, kind, case, prompts, [gaps.answer, answer])
        unread = made_prompt(f"{seed} {kind} prefill", case.tokens)
        gap_ms = asyncio.run(measures.gap_beside_a_prefill(pair, unread, beside[2]))
        measures.wait_idle(pair.decode)
        note("gap beside a prefill", kind, self.setting, case, gap_ms)

    def _turn_of(self, kind: str) -> Pair:
        self.fleet.turns.only(kind)
        return self.fleet.pairs[kind]

    def _judge(self) -> None:
        self.fleet.turns.only(ALONE)
        for line in self.exam.judge(self.book, self.setting, self._right):
            self.report(f"a wrong answer: {line}")

    def _right(self, prompts: Sequence[list[int]]) -> list[str]:
        return [answer.text for answer in asyncio.run(ask_all(self.fleet.alone.url, prompts))]
