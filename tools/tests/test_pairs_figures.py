"""Figures of engine pairs: medians, bounds, and the command line."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvdev.arguments import make_parser
from kvdev.benching import run_bench
from kvdev.pairs.asking import Answer
from kvdev.pairs.figures import TARGETS, Book, described, rows_of, spread_of, target_for, unjudged, where_of
from kvdev.pairs.plan import ALONE, KINDS, Case, Setting
from kvdev.pairs.running import Exam
from kvdev.steps import DevError

LONG = Case(1900)
DEFAULT, TCP = Setting("default", 256), Setting("tcp", 256)

# --------------------------------------------------------------------------------------------------------------- figures


def book_of(worst_ours: float = 40) -> Book:
    book = Book()
    for tokens, factor in ((256, 1.0), (1900, 3.0)):
        case = Case(tokens)
        book.add("hand-over", "ours", DEFAULT, case, 10 * factor, 12 * factor, 11 * factor)
        book.add("hand-over", "vllm", DEFAULT, case, 20 * factor, 22 * factor, 30 * factor)
    book.add("worst gap", "ours", DEFAULT, LONG, worst_ours)
    book.add("worst gap", "vllm", DEFAULT, LONG, 100)
    for kind in ("ours", "vllm"):
        book.add("usual gap", kind, DEFAULT, LONG, 35)
        book.add("prefill throughput", kind, DEFAULT, LONG, 960)
        book.add("wrong answers", kind, DEFAULT, LONG, 0.0, 0.0)
        book.add("worker at rest", kind, DEFAULT, None, {"ours": 0.2, "vllm": 99.0}[kind])
    book.add("prefill throughput", ALONE, DEFAULT, LONG, 1000)
    return book


def row(rows: list[dict[str, Any]], measure: str, kind: str, beside: str, **where: object) -> dict[str, Any]:
    (found,) = [
        one for one in rows
        if (one["measure"], one["kind"], one["beside"]) == (measure, kind, beside) and where.items() <= one["where"].items()
    ]  # fmt: skip
    return found


def test_rows_are_ratios_of_medians_with_quartiles() -> None:
    rows = rows_of(book_of(), list(KINDS))
    long = row(rows, "hand-over", "ours", "vllm", tokens=1900)
    assert (long["ours"], long["baseline"], long["ratio"], long["unit"], long["samples"]) == (33, 66, 0.5, "ms", 3)
    assert long["spread"] == [31.5, 34.5, 63, 78]
    assert (long["target"], long["met"]) == ("context", True)
    assert all({"name", "unit", "ours", "baseline", "ratio", "target", "met"} <= one.keys() for one in rows)
    assert len({one["name"] for one in rows}) == len(rows)
    assert row(rows, "worker at rest", "ours", "vllm")["ratio"] == 0.002
    assert row(rows, "prefill throughput", "ours", ALONE)["target"] == ">= 0.95"
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(("worst_ms", "met"), [(40, (True, True)), (45.6, (False, False)), (45.1, (False, True))])
def test_bounds_decide_whether_a_row_is_met(worst_ms: float, met: tuple[bool, bool]) -> None:
    rows = rows_of(book_of(worst_ms), list(KINDS))
    against = row(rows, "worst gap", "ours", "vllm"), row(rows, "worst gap", "ours", "usual gap")
    assert tuple(one["met"] for one in against) == met


def test_a_third_kind_has_rows_and_bounds_as_soon_as_it_is_measured() -> None:
    book = book_of()
    book.add("hand-over", "streamed", DEFAULT, LONG, 17)
    rows = rows_of(book, ["ours", "streamed", "vllm"])
    slow = row(rows, "hand-over", "streamed", "ours")
    assert (slow["target"], slow["met"], slow["ratio"]) == ("<= 0.5", False, 0.515)
    assert row(rows, "hand-over", "streamed", "vllm")["target"] == "<= 0.35"
    assert not [one for one in rows_of(book_of(), list(KINDS)) if "streamed" in one["name"]]


def streamed_book(*, early: float = 93, streamed_ms: float = 2075) -> Book:
    book = book_of()
    many, held = Setting("default", 112), Case(1900, "held")
    for kind, first in (("ours", 2150), ("streamed", streamed_ms), ("vllm", 2700)):
        book.add("first token", kind, many, LONG, first)
        book.add("first token", kind, many, held, {"ours": 400, "streamed": 380, "vllm": 600}[kind])
    book.add("hand-over", "ours", many, LONG, 180, 181, 190)
    book.add("decode step", "ours", many, LONG, 70)
    book.add("last read", "ours", many, LONG, 5)
    book.add("early bytes", "streamed", many, LONG, early, early, 0)
    book.add("early bytes", "streamed", DEFAULT, LONG, 50)
    return book


def test_time_saved_is_beside_what_plain_takes_beyond_the_floor() -> None:
    kinds = list(KINDS)
    saved = row(rows_of(streamed_book(), kinds), "saved", "streamed", "plain less floor")
    assert (saved["ours"], saved["baseline"], saved["ratio"]) == (75, 106, 0.708)
    assert (saved["target"], saved["met"], saved["where"]["chunk"]) == (">= 0.6", True, 112)
    assert not row(rows_of(streamed_book(streamed_ms=2087), kinds), "saved", "streamed", "plain less floor")["met"]
    several = streamed_book()
    for plain, streamed in (
        (3000, 2900),
        (2000, 1990),
    ):  # medians of all: 2150 and 2075, whose difference would be 75, too
        several.add("first token", "ours", Setting("default", 112), LONG, plain)
        several.add("first token", "streamed", Setting("default", 112), LONG, streamed)
    found = row(rows_of(several, kinds), "saved", "streamed", "plain less floor")
    assert (found["ours"], found["samples"], found["spread"]) == (75, 3, [42.5, 87.5, 106, 106])
    lacking = book_of()
    lacking.add("last read", "ours", DEFAULT, LONG, 5)
    assert not [one for one in rows_of(lacking, kinds) if one["measure"] == "saved"]


def test_bytes_that_came_early_are_judged_where_there_are_many_steps() -> None:
    rows = rows_of(streamed_book(), list(KINDS))
    many, few = (row(rows, "early bytes", "streamed", "all bytes", chunk=chunk) for chunk in (112, 256))
    assert (many["ours"], many["ratio"], many["target"], many["met"]) == (93, 0.93, ">= 0.85", True)
    assert (few["target"], few["met"]) == ("context", True)
    late = row(rows_of(streamed_book(early=84), list(KINDS)), "early bytes", "streamed", "all bytes", chunk=112)
    assert not late["met"]


def test_a_prefix_that_the_prefill_engine_holds_has_a_bound_of_its_own() -> None:
    rows = [one for one in rows_of(streamed_book(), list(KINDS)) if one["measure"] == "first token"]
    targets = {(one["beside"], one["where"]["prefix"]): one["target"] for one in rows if one["kind"] == "streamed"}
    assert targets == {
        ("ours", "new"): "context",
        ("ours", "held"): "<= 0.95",
        ("vllm", "new"): "<= 0.8",
        ("vllm", "held"): "context",
    }
    assert row(rows, "first token", "streamed", "ours", prefix="held")["name"].endswith(
        "1900 tokens, all but 108 held, default transports, steps of 112"
    )


def test_a_bound_that_nothing_was_measured_for_is_not_met() -> None:
    missing = {(one["measure"], one["kind"], one["beside"]) for one in unjudged(rows_of(book_of(), list(KINDS)))}
    assert missing == {
        (target.measure, target.one or "ours", target.other)
        for target in TARGETS
        if target.measure in {"early bytes", "hand-over", "saved", "first token"}
    }
    left = unjudged(rows_of(streamed_book(), list(KINDS)))
    assert {(one["measure"], one["met"]) for one in left} == {("hand-over", False)}
    assert len({one["name"] for one in left}) == len(left) == 3


def test_bounds_hold_where_they_are_said_to() -> None:
    def bound(one: str, other: str, setting: Setting, case: Case) -> str:
        return str(target_for("hand-over", one, other, where_of(setting, case)))

    assert bound("streamed", "ours", DEFAULT, LONG) == "<= 0.5"
    assert bound("streamed", "ours", TCP, LONG) == "<= 0.4"
    assert bound("streamed", "vllm", TCP, LONG) == "None"
    assert bound("streamed", "ours", DEFAULT, Case(256)) == "None"
    assert target_for("worker at rest", "vllm", "vllm", where_of(DEFAULT, None)) is None
    assert len({(each.measure, each.one, each.other, str(each.where)) for each in TARGETS}) == len(TARGETS)


def test_a_figure_beside_nothing_keeps_to_no_bound() -> None:
    book = Book()
    book.add("worst gap", "ours", DEFAULT, LONG, 40)
    book.add("usual gap", "ours", DEFAULT, LONG, 0)
    beside_nothing = row(rows_of(book, ["ours"]), "worst gap", "ours", "usual gap")
    assert (beside_nothing["met"], beside_nothing["ratio"]) == (False, 1e6)


def test_one_wrong_answer_fails_the_run() -> None:
    book = book_of()
    assert row(rows_of(book, list(KINDS)), "wrong answers", "vllm", "samples")["met"] is True
    book.add("wrong answers", "vllm", DEFAULT, LONG, 1.0)
    wrong = row(rows_of(book, list(KINDS)), "wrong answers", "vllm", "samples")
    assert (wrong["ours"], wrong["baseline"], wrong["met"]) == (1, 3, False)


def test_answers_are_compared_with_those_of_one_engine_alone() -> None:
    book, exam = Book(), Exam()
    given = [cast("Answer", SimpleNamespace(text=text)) for text in ("aa", "bb")]
    for kind, answers in (("ours", given), ("vllm", given[:1] * 2)):
        for prompt, answer in zip(([4], [5]), answers, strict=True):
            exam.note(kind, LONG, prompt, answer)
    told = exam.judge(book, DEFAULT, lambda prompts: [{4: "aa", 5: "bb"}[prompt[0]] for prompt in prompts])
    assert len(told) == 1
    assert told[0].startswith("vllm, ")
    where = where_of(DEFAULT, LONG)
    assert book.samples("wrong answers", "ours", where) == [0, 0]
    assert sum(book.samples("wrong answers", "vllm", where)) == 1
    assert exam.judge(book, DEFAULT, lambda _: pytest.fail("nothing is asked twice")) == []


def test_quartiles_and_words() -> None:
    assert spread_of([1, 2, 3, 4, 5]) == (2, 4)
    assert spread_of([7]) == (7, 7)
    assert described(dict(where_of(TCP, Case(512)))) == "512 tokens, UCX_TLS=tcp, steps of 256"
    assert described(dict(where_of(DEFAULT, None))) == "default transports, steps of 256"
    with pytest.raises(KeyError):
        Book().add("hand over", "ours", DEFAULT, None, 1)


# --------------------------------------------------------------------------------------------------------------- command line


def test_sizes_are_options_of_the_bench() -> None:
    parse = make_parser().parse_args
    assert parse(["bench", "connector"]).size == parse(["bench", "connector", "--quick"]).size == "quick"
    assert parse(["bench", "connector", "--gates", "--json"]).size == "gates"


def test_a_benchmark_without_sizes_says_so() -> None:
    with pytest.raises(DevError, match="'topology' has one size: --gates is not for it"):
        run_bench("topology", as_json=False, size="gates")
