"""Carry a plan out: start the engines of each setting, let the pairs take turns, and keep every answer to be compared."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from kvdev.pairs import measures
from kvdev.pairs.asking import Answer, ask_all, made_prompt
from kvdev.pairs.figures import Book
from kvdev.pairs.fleet import Fleet, Pair, started_fleet
from kvdev.pairs.plan import ALONE, PROMPTS_OF_A_RATE, Case, Plan, Setting, last_step_tokens, left_tokens
from kvdev.steps import DevError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvdev.forked import Starter

__all__ = ["Exam", "carry_out"]

_CONTACT = Case(256)


@final
@dataclass
class Exam:
    """Answers that were given to prompts, to be compared with those of one engine alone."""

    given: list[tuple[str, Case, list[int], str]] = field(default_factory=list)

    def note(self, kind: str, case: Case, prompt: list[int], answer: Answer) -> None:
        """Note what a kind of pair answered to a prompt."""
        self.given.append((kind, case, prompt, answer.text))

    def judge(self, book: Book, setting: Setting, right: Callable[[Sequence[list[int]]], Sequence[str]]) -> list[str]:
        """Ask for the right answers, count those that differ, and forget all; returns the differences in words."""
        prompts = list({tuple(prompt): prompt for _, _, prompt, _ in self.given}.values())
        texts = dict(zip(map(tuple, prompts), right(prompts), strict=True)) if prompts else {}
        differences: list[str] = []
        for kind, case, prompt, text in self.given:
            due = texts[tuple(prompt)]
            book.add("wrong answers", kind, setting, case, float(text != due))
            differences += [f"{kind}, {case}: {text!r}, alone {due!r}"] * (text != due)
        self.given.clear()
        return differences


def carry_out(plan: Plan, starter: Starter, python: Path, model: Path, report: Callable[[str], None]) -> Book:
    """Measure all settings of a plan."""
    book = Book()
    for setting in plan.settings:
        began_s = time.monotonic()
        with started_fleet(starter, python, model, setting, plan) as fleet:
            report(f"{setting}: engines are up ({time.monotonic() - began_s:.0f} s)")
            _Run(plan, setting, fleet, book, f"{setting.transport} {setting.chunk}", report).all()
        report(f"{setting}: measured ({time.monotonic() - began_s:.0f} s)")
    return book


@final
@dataclass
class _Run:
    """Measurements of the engines of one setting."""

    plan: Plan
    setting: Setting
    fleet: Fleet
    book: Book
    seed: str
    report: Callable[[str], None]
    exam: Exam = field(default_factory=Exam)

    def all(self) -> None:
        """Take every measure."""
        self._contacts()
        last = 0
        for number, case, kind in self.plan.steps():
            if number != last:
                self._judge()
            last = number
            self._case(number, case, kind)
        self._judge()
        self._pairs()
        for number in range(self.plan.engine_rounds):
            self._engines(number)

    # ------------------------------------------------------------------------------------------------------ hand-overs

    def _contacts(self) -> None:
        """Let all engines of a pair make their own first steps, and connect; neither is measured."""
        for kind, pair in self.fleet.pairs.items():
            self.fleet.turns.only(kind)
            for engine in (pair.prefill, pair.decode):
                asyncio.run(ask_all(engine.url, [made_prompt(f"{self.seed} warm {engine.spec.name}", _CONTACT.tokens)]))
            prompt = made_prompt(f"{self.seed} contact", _CONTACT.tokens)
            self.exam.note(kind, _CONTACT, prompt, measures.hand_over(pair, prompt))
        self._judge()

    def _pairs(self) -> None:
        """Hand over the longest new prompt some more times, plain and streamed alone, for the time that streaming saves."""
        case = Case(self.plan.longest)
        kinds = [kind for kind in ("ours", "streamed") if kind in self.plan.kinds]
        if len(kinds) < 2 or case not in self.plan.cases:
            return
        for number in range(self.plan.pair_rounds):
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                self._case(self.plan.rounds + number, case, kind)
            self._judge()

    def _case(self, number: int, case: Case, kind: str) -> None:
        prompt, pair = made_prompt(f"{self.seed} {number} {case}", case.tokens), self._turn_of(kind)
        if case.prefix == "held":
            measures.hold_prefix(pair.prefill, prompt[: case.tokens - left_tokens(case.tokens)])
        before = measures.counts_of(pair.decode)
        answer = measures.hand_over(pair, prompt)
        after = measures.counts_of(pair.decode)
        note = self.book.add
        note("recomputed", kind, self.setting, case, after.recomputed - before.recomputed)
        if answer.prefill_ms:
            note("hand-over", kind, self.setting, case, answer.hand_over_ms)
        note("first token", kind, self.setting, case, answer.first_token_ms)
        if len(answer.times_s) > 1:
            note("decode step", kind, self.setting, case, answer.step_ms)
        if pair.early:
            note("early bytes", kind, self.setting, case, measures.early_share(before, after, case.tokens))
        self.exam.note(kind, case, prompt, answer)

    # --------------------------------------------------------------------------------------------------------- engines

    def _engines(self, number: int) -> None:
        """Measure each pair under prefills, at rest, and beside other requests; the engine alone takes its turn at prefills."""
        case, seed = Case(self.plan.longest), f"{self.seed} engines {number}"
        timed = [made_prompt(f"{seed} {each}", case.tokens) for each in range(PROMPTS_OF_A_RATE)]
        turns = [*self.plan.kinds, ALONE]
        for kind in turns if number % 2 == 0 else reversed(turns):
            self.fleet.turns.only(kind)
            pair = self.fleet.pairs.get(kind)
            engines = [pair.prefill, pair.decode] if pair else [self.fleet.alone]
            rate = asyncio.run(measures.prefill_rate(engines[0], pair, timed))
            self.book.add("prefill throughput", kind, self.setting, case, rate)
            shares = (100 * each for each in measures.rest_shares(engines))
            self.book.add("worker at rest", kind, self.setting, None, *shares)
            try:
                if pair:
                    self._beside(kind, pair, case, seed)
            except DevError as error:  # figures of this pair alone are missing
                self.report(f"not measured, {kind}: {error}")
        self._judge()

    def _beside(self, kind: str, pair: Pair, case: Case, seed: str) -> None:
        """Measure the gaps of another request of the decode engine: beside a read, and beside a prefill that nobody reads."""
        if kind == "ours":
            last = made_prompt(f"{seed} last", last_step_tokens(case.tokens, self.setting.chunk))
            self.book.add("last read", kind, self.setting, case, measures.last_read_ms(pair, last))
        prompt, unread = (made_prompt(f"{seed} {part}", case.tokens) for part in ("gap", f"{kind} prefill"))
        beside = [made_prompt(f"{seed} {part} beside", 64) for part in ("gap", "prefill")]
        gaps = asyncio.run(measures.gaps_beside_a_read(pair, prompt, beside[0]))
        measures.wait_idle(pair.decode)
        self.book.add("worst gap", kind, self.setting, case, gaps.worst)
        self.book.add("usual gap", kind, self.setting, case, gaps.usual)
        self.exam.note(kind, case, prompt, gaps.answer)
        gap_ms = asyncio.run(measures.gap_beside_a_prefill(pair, unread, beside[1]))
        measures.wait_idle(pair.decode)
        self.book.add("gap beside a prefill", kind, self.setting, case, gap_ms)

    def _turn_of(self, kind: str) -> Pair:
        self.fleet.turns.only(kind)
        return self.fleet.pairs[kind]

    def _judge(self) -> None:
        self.fleet.turns.only(ALONE)
        for line in self.exam.judge(self.book, self.setting, self._right):
            self.report(f"a wrong answer: {line}")

    def _right(self, prompts: Sequence[list[int]]) -> list[str]:
        return [answer.text for answer in asyncio.run(ask_all(self.fleet.alone.url, prompts))]
