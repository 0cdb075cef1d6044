"""Speed of hand-overs between real vLLM engines on CPU: pairs with our connector, plain and streamed, and with vLLM's own.

The pairs are measured by turns, whose order changes with each round. The model has 131 072 bytes of cache a token and little to
compute. Every answer is compared with that of an engine that computes the same prompt alone.

A hand-over lasts from the prefill engine's answer, as the demo router sees it, to the decode engine's first token at the client.
Rows with a target are gates: figure (`ratio`), bound and verdict (`met`). A bound that nothing was measured for is not met.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from kvdev.engines import local_model
from kvdev.envs import DEFAULT_VLLM
from kvdev.forked import started_starter
from kvdev.pairs import measures
from kvdev.pairs.asking import Answer, ask_all, made_prompt
from kvdev.pairs.engines import ALONE, BLOCK_TOKENS, CONFIGS, Fleet, Pair, started_fleet
from kvdev.steps import DevError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["SIZES", "run"]

KINDS: Final = tuple(CONFIGS)


class Place(NamedTuple):
    """Where a sample was taken.

    Attributes:
        transport: `default`, or `tcp` for `UCX_TLS=tcp`.
        chunk: Most tokens of a step.
        tokens: Length of the prompt; 0 for none.
        prefix: `new`, or `held`: the prefill engine's cache holds all but its last `left_tokens`.
    """

    transport: str
    chunk: int
    tokens: int = 0
    prefix: str = ""

    def __str__(self) -> str:
        """Return it as names of rows have it."""
        words = [f"{self.tokens} tokens"] * bool(self.tokens)
        words += [f"all but {left_tokens(self.tokens)} held"] * (self.prefix == "held")
        words += ["UCX_TLS=tcp" if self.transport == "tcp" else "default transports", f"steps of {self.chunk}"]
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Plan:
    """Cases of a run and how often each is measured.

    `pair_rounds` are further samples of the longest new prompt, plain and streamed: what streaming saves is small beside what a
    prefill takes longer or shorter from one time to the next.
    """

    transports: Sequence[str]
    chunks: Sequence[int]
    cases: Sequence[tuple[int, str]]
    rounds: int
    pair_rounds: int
    engine_rounds: int = 3


SIZES: Final[Mapping[str, Plan]] = {
    "quick": Plan(["default"], [256], [(256, "new"), (1900, "new")], rounds=3, pair_rounds=1),
    "gates": Plan(["default", "tcp"], [256, 112], [(1900, "new"), (1900, "held")], rounds=7, pair_rounds=60),
}
"""Sizes of a run that `dev.py bench` knows."""
LONGEST: Final = 1900
"""Tokens of the longest prompt; engines are measured beside other requests with prompts of this length."""


class Target(NamedTuple):
    """A bound of a ratio of medians: of `one` (empty: every kind but vLLM's own) beside `other`, where `holds_for` the place."""

    measure: str
    one: str
    other: str
    bound: float
    is_least: bool = False
    holds_for: Callable[[Place], bool] = lambda _: True

    def __str__(self) -> str:
        """Return the bound as tables have it."""
        return f"{'>=' if self.is_least else '<='} {self.bound:g}"


def _is_long(place: Place) -> bool:
    return place.tokens == LONGEST and place.prefix == "new"


TARGETS: Final = (
    # In steps of 112, 1900 tokens take 17 steps; in steps of 256 they take 8.
    Target("early bytes", "streamed", "all bytes", 0.85, True, lambda place: _is_long(place) and place.chunk == 112),
    Target("hand-over", "streamed", "ours", 0.5, False, lambda place: _is_long(place) and place.transport == "default"),
    Target("hand-over", "streamed", "ours", 0.4, False, lambda place: _is_long(place) and place.transport == "tcp"),
    Target(
        "hand-over", "streamed", "vllm", 0.35, False, lambda place: _is_long(place) and place.transport == "default"
    ),
    Target("saved", "streamed", "plain less floor", 0.6, True, _is_long),
    Target("first token", "streamed", "ours", 0.95, False, lambda place: place.prefix == "held"),
    Target("first token", "streamed", "vllm", 0.8, False, _is_long),
    Target("worst gap", "", "vllm", 0.45),
    Target("worst gap", "", "usual gap", 1.3),
    Target("worker at rest", "", "vllm", 0.02),
    Target("prefill throughput", "", ALONE, 0.95, True),
)
UNITS: Final = {"early bytes": "% of the bytes", "worker at rest": "% of a core", "prefill throughput": "tokens/s"}
"""Units of measures that are not milliseconds."""
_BESIDE: Final = (("ours", "vllm"), ("streamed", "ours"), ("streamed", "vllm"))


def run(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure what the size says (`KV_BENCH_SIZE`); return rows of medians of alternating rounds."""
    signal.signal(signal.SIGTERM, _end)
    size = os.environ.get("KV_BENCH_SIZE", "quick")
    plan, book = SIZES[size], Book()
    python, model = local_model(Path(os.environ["KVDEV_UV"]), "fat", DEFAULT_VLLM)
    with started_starter(python) as starter:
        for transport in plan.transports:
            for chunk in plan.chunks:
                began_s = time.monotonic()
                environment = {"UCX_TLS": "tcp"} if transport == "tcp" else {}
                with started_fleet(starter, python, model, chunk, environment) as fleet:
                    report(f"{transport}, steps of {chunk}: engines are up ({time.monotonic() - began_s:.0f} s)")
                    _Setting(plan, Place(transport, chunk), fleet, book, report).measure()
                report(f"{transport}, steps of {chunk}: measured ({time.monotonic() - began_s:.0f} s)")
    return rows_of(book, needs_all=size == "gates")


def _end(_number: int, _frame: object) -> None:
    """Unwind at a SIGTERM, so that engines, stopped ones too, and routers are ended."""
    raise SystemExit(1)


def left_tokens(tokens: int) -> int:
    """Return the tokens of a prompt that a prefill engine computes which holds all whole blocks but the last 128 tokens.

    Of 1900 tokens 14 blocks of 128 are held, 108 tokens are left; of 1920 tokens 14 as well, and 128 are left.
    """
    return tokens - (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def last_step_tokens(tokens: int, chunk: int) -> int:
    """Return the tokens whose blocks are whole, or there at all, only when a prompt's last step has ended.

    1900 tokens in steps of 256 or of 112: the last step begins at token 1792, where a block begins: 108. In steps of 100 it
    begins at 1800, within the block of 1792: also 108.
    """
    return tokens - (tokens - 1) // chunk * chunk // BLOCK_TOKENS * BLOCK_TOKENS


# ------------------------------------------------------------------------------------------------------------- figures


@final
class Book:
    """Samples by measure, kind and place."""

    def __init__(self) -> None:
        self.samples: defaultdict[tuple[str, str, Place], list[float]] = defaultdict(list)

    def add(self, measure: str, kind: str, place: Place, *values: float) -> None:
        """Note samples."""
        self.samples[measure, kind, place] += values

    def of(self, measure: str, kind: str, place: Place) -> list[float]:
        """Return the samples of a kind; empty if there are none."""
        return self.samples.get((measure, kind, place), [])


def rows_of(book: Book, *, needs_all: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a run: kinds compared, and what needs no other kind; with `needs_all` each bound that was not judged."""
    rows: list[dict[str, Any]] = []
    judged: set[Target] = set()
    for measure, one, other, place, mine, theirs in _compared(book):
        ours, baseline = statistics.median(mine), statistics.median(theirs)
        # Beside a figure of 0 no upper bound is kept.
        ratio = ours / baseline if baseline else 1e6 * (ours > 0)
        target = _target_of(measure, one, other, place)
        judged |= {target} if target else set()
        is_met = target is None or (ratio >= target.bound if target.is_least else ratio <= target.bound)
        rows.append({
            "name": f"{measure}, {one} beside {other}, {place}", "unit": UNITS.get(measure, "ms"),
            "ours": round(ours, 3), "baseline": round(baseline, 3), "ratio": round(ratio, 3),
            "target": str(target) if target else "context", "met": is_met,
            "spread": [round(value, 3) for value in (*_quartiles(mine), *_quartiles(theirs))], "samples": len(mine),
        })  # fmt: skip
    rows += _counted(book)
    for target in TARGETS if needs_all else ():
        if target not in judged:
            name = f"{target.measure}, {target.one or 'ours'} beside {target.other}: not measured"
            rows.append(
                {
                    "name": name,
                    "unit": "",
                    "ours": 0.0,
                    "baseline": 0.0,
                    "ratio": 0.0,
                    "target": str(target),
                    "met": False,
                }
            )
    return rows


def _compared(book: Book) -> Iterator[tuple[str, str, str, Place, list[float], list[float]]]:
    """Yield (measure, kind, what it is compared with, place, samples of both)."""
    for measure, kind, place in list(book.samples):
        mine = book.of(measure, kind, place)
        others = [(other, book.of(measure, other, place)) for one, other in [*_BESIDE, (kind, ALONE)] if one == kind]
        if measure == "worst gap":
            others += [(gap, book.of(gap, kind, place)) for gap in ("usual gap", "gap beside a prefill")]
        if measure == "early bytes":
            others = [("all bytes", [100.0])]
        if measure not in _COUNTED:
            yield from (
                (measure, kind, other, place, mine, theirs) for other, theirs in others if theirs and other != kind
            )
        if measure == "last read":
            yield from _saved(book, place)


def _saved(book: Book, place: Place) -> Iterator[tuple[str, str, str, Place, list[float], list[float]]]:
    """Yield the time that streaming saves until the first token, beside the most that it can.

    That is a plain hand-over less one decode step and the read of the last step's blocks. What is saved is the median of the
    differences of each round, whose two prefills have the same neighbours. A plain hand-over of 181 ms, decode steps of 70 ms
    and a last read of 5 ms leave 106 ms. Prompts whose first token comes after 2075 ms, streamed, and after 2150 ms, plain,
    save 75 ms of that: 0.708.
    """
    plain, streamed = (book.of("first token", kind, place) for kind in ("ours", "streamed"))
    floor = [book.of(each, "ours", place) for each in ("hand-over", "decode step", "last read")]
    if plain and streamed and all(floor):
        over, step, read = map(statistics.median, floor)
        saved = [early - late for early, late in zip(plain, streamed, strict=True)]
        yield "saved", "streamed", "plain less floor", place, saved, [over - step - read]


_COUNTED: Final = ("wrong answers", "recomputed")
"""Measures whose samples are added up, and whose sum must be 0; vLLM's own connector may recompute."""


def _counted(book: Book) -> Iterator[dict[str, Any]]:
    for (measure, kind, place), samples in book.samples.items():
        if measure in _COUNTED:
            is_judged = measure == "wrong answers" or kind != "vllm"
            yield {
                "name": f"{measure}, {kind}, {place}", "unit": "", "ours": sum(samples), "baseline": len(samples),
                "ratio": round(sum(samples) / len(samples), 3), "target": "0" if is_judged else "context",
                "met": sum(samples) == 0 or not is_judged, "samples": len(samples),
            }  # fmt: skip


def _target_of(measure: str, one: str, other: str, place: Place) -> Target | None:
    """Return the bound of a row; None for a row that is context."""
    for target in TARGETS:
        is_kind = one == target.one or (not target.one and one in {"ours", "streamed"})
        if (measure, other) == (target.measure, target.other) and is_kind and target.holds_for(place):
            return target
    return None


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return the quartiles: of 1, 2, 3, 4 and 5 they are 2 and 4; of one sample it is both."""
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


# ----------------------------------------------------------------------------------------------------------- measuring


@final
@dataclass
class _Setting:
    """Measurements of the engines of one setting."""

    plan: Plan
    place: Place
    fleet: Fleet
    book: Book
    report: Callable[[str], None]
    given: list[tuple[str, Place, list[int], str]] = field(default_factory=list)
    """Answers to be compared with those of one engine alone: kind, place, prompt, text."""

    def measure(self) -> None:
        """Take all samples of the plan."""
        for (
            kind,
            pair,
        ) in self.fleet.pairs.items():  # the first steps of each engine, and its first connection, are not measured
            self.fleet.only(kind)
            for engine in self.fleet.groups[kind]:
                asyncio.run(ask_all(engine.url, [made_prompt(f"first steps of {engine.spec.name}", 256)]))
            measures.hand_over(pair, made_prompt(f"contact {kind}", 256))
        for number in range(self.plan.rounds):
            for case in self.plan.cases:
                for kind in _in_turn(KINDS, number):
                    self._sample(number, self.place._replace(tokens=case[0], prefix=case[1]), kind)
            self._judge()
        for number in range(self.plan.rounds, self.plan.rounds + self.plan.pair_rounds):
            for kind in _in_turn(("ours", "streamed"), number):
                self._sample(number, self.place._replace(tokens=LONGEST, prefix="new"), kind)
        self._judge()
        for number in range(self.plan.engine_rounds):
            self._measure_engines(number)

    def _sample(self, number: int, place: Place, kind: str) -> None:
        self.fleet.only(kind)
        prompt, pair = made_prompt(f"{number} {place}", place.tokens), self.fleet.pairs[kind]
        if place.prefix == "held":
            measures.hold_prefix(pair.prefill, prompt[: place.tokens - left_tokens(place.tokens)])
        before = measures.counts_of(pair.decode)
        answer = measures.hand_over(pair, prompt)
        after = measures.counts_of(pair.decode)
        self.book.add("recomputed", kind, place, after.recomputed - before.recomputed)
        if answer.prefill_ms:
            self.book.add("hand-over", kind, place, answer.hand_over_ms)
        self.book.add("first token", kind, place, answer.first_token_ms)
        if len(answer.times_s) > 1:
            self.book.add("decode step", kind, place, answer.step_ms)
        if pair.early:
            self.book.add("early bytes", kind, place, measures.early_share(before, after, place.tokens))
        self._note(kind, place, prompt, answer)

    def _measure_engines(self, number: int) -> None:
        """Measure each pair under prefills, at rest, and beside other requests; the engine alone takes its turn at prefills."""
        place = self.place._replace(tokens=LONGEST, prefix="new")
        timed = [made_prompt(f"{self.place} engines {number} {each}", LONGEST) for each in range(4)]
        for kind in _in_turn((*KINDS, ALONE), number):
            self.fleet.only(kind)
            pair = self.fleet.pairs.get(kind)
            engines = self.fleet.groups[kind]
            self.book.add(
                "prefill throughput", kind, place, asyncio.run(measures.prefill_rate(engines[0], pair, timed))
            )
            self.book.add("worker at rest", kind, self.place, *(100 * share for share in measures.rest_shares(engines)))
            try:
                if pair:
                    self._measure_beside(kind, pair, place, f"{self.place} beside {number}")
            except DevError as error:  # figures of this pair alone are missing
                self.report(f"not measured, {kind}: {error}")
        self._judge()

    def _measure_beside(self, kind: str, pair: Pair, place: Place, seed: str) -> None:
        """Measure the gaps of another request of the decode engine: beside a read, and beside a prefill that is not read."""
        if kind == "ours":
            last = made_prompt(f"{seed} last", last_step_tokens(place.tokens, place.chunk))
            self.book.add("last read", kind, place, measures.last_read_ms(pair, last))
        prompt, unread = (made_prompt(f"{seed} {part}", place.tokens) for part in ("gap", f"{kind} prefill"))
        beside = [made_prompt(f"{seed} {part} beside", 64) for part in ("gap", "prefill")]
        gaps = asyncio.run(measures.gaps_beside_a_read(pair, prompt, beside[0]))
        measures.wait_idle(pair.decode)
        self.book.add("worst gap", kind, place, gaps.worst)
        self.book.add("usual gap", kind, place, gaps.usual)
        self._note(kind, place, prompt, gaps.answer)
        gap_ms = asyncio.run(measures.gap_beside_a_prefill(pair, unread, beside[1]))
        measures.wait_idle(pair.decode)
        self.book.add("gap beside a prefill", kind, place, gap_ms)

    def _note(self, kind: str, place: Place, prompt: list[int], answer: Answer) -> None:
        self.given.append((kind, place, prompt, answer.text))

    def _judge(self) -> None:
        """Let the engine alone answer all prompts, and count the answers that differ."""
        self.fleet.only(ALONE)
        prompts = list({tuple(prompt): prompt for _, _, prompt, _ in self.given}.values())
        right = asyncio.run(ask_all(self.fleet.alone.url, prompts))
        texts = {tuple(prompt): answer.text for prompt, answer in zip(prompts, right, strict=True)}
        for kind, place, prompt, text in self.given:
            due = texts[tuple(prompt)]
            self.book.add("wrong answers", kind, place, float(text != due))
            if text != due:
                self.report(f"a wrong answer: {kind}, {place}: {text!r}, alone {due!r}")
        self.given.clear()


def _in_turn(kinds: Sequence[str], number: int) -> Sequence[str]:
    """Return kinds in the order of a round; it turns, so that being first costs each the same."""
    return kinds if number % 2 == 0 else kinds[::-1]
