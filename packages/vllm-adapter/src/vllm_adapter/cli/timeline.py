"""Timeline of one hand-over: named spans from the prompt's arrival at prefill to the first token of decode.

Spans touch one another: each ends at a moment that some process has stamped, and there the next one begins. A moment that is
missing makes the span that would end there *unnamed*; its time is counted as unexplained. Engines see neither the way from
the client to prefill nor that of the first token to the client: with the time that a client has measured, that part is
counted, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.cli.trace_steps import steps_of

if TYPE_CHECKING:
    from vllm_adapter.cli.clocks import Clocks
    from vllm_adapter.cli.joining import HandOver, Told
    from vllm_adapter.cli.trace_steps import Step

__all__ = ["MOST_UNEXPLAINED", "Span", "Timeline", "make_timeline"]

MOST_UNEXPLAINED = 0.05
"""Part of the time to the first token that may stay without a name."""
_FIRST_CONTACT = frozenset({"told", "planned"})
_OF_A_READ = frozenset({"allocated", "reported"})
_OUTSIDE = "entered"


@final
@dataclass(frozen=True, slots=True)
class Span:
    """A part of the time to the first token.

    Attributes:
        name: Name of the activity; of an unnamed span, what is missing.
        where: `prefill` or `decode` with the part of that engine, as `decode 0.1`; `outside` between the two.
        begin_s: Seconds from the beginning.
        duration_s: How long it took.
        is_named: Whether the moment at its end was told.
    """

    name: str
    where: str
    begin_s: float
    duration_s: float
    is_named: bool = True


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """All spans of a hand-over.

    Attributes:
        hand_over: The hand-over that it shows.
        spans: In order, without gaps.
        side_spans: Spans beside the way to the first token: the other ranks' reads, the lease at prefill.
        uncertainty_s: Uncertainty of each process's clock against that of decode's scheduler; None where it is unknown.
        measured_s: Time to the first token as a client measured it, if it did.
    """

    hand_over: HandOver
    spans: tuple[Span, ...]
    side_spans: tuple[Span, ...]
    uncertainty_s: dict[str, float | None]
    measured_s: float | None = None

    @property
    def total_s(self) -> float:
        """The time to the first token: the client's, or else as far as the engines see it."""
        return self.seen_s if self.measured_s is None else self.measured_s

    @property
    def seen_s(self) -> float:
        """The sum of all spans."""
        return sum(span.duration_s for span in self.spans)

    @property
    def named_s(self) -> float:
        """The sum of the named spans."""
        return sum(span.duration_s for span in self.spans if span.is_named)

    @property
    def unexplained_s(self) -> float:
        """Time without a name; of a client that measured less than the spans cover, by how much it did."""
        return abs(self.total_s - self.named_s)

    @property
    def unexplained_part(self) -> float:
        """The same as a part of the whole."""
        return self.unexplained_s / self.total_s if self.total_s > 0 else 0.0

    def as_values(self) -> dict[str, Any]:
        """Return everything as plain values."""
        decode, prefill = self.hand_over.decode, self.hand_over.prefill
        return {
            "decode": {"engine_id": decode.engine_id, "request_id": decode.request_id},
            "prefill": {
                "engine_id": decode.facts.get("peer_engine_id"),
                "request_id": decode.facts.get("peer_request_id"),
                "is_known": prefill is not None,
            },
            "tokens": decode.facts.get("tokens"),
            "bytes": self.hand_over.summed("bytes"),
            "is_streamed": self.hand_over.is_streamed,
            "early_bytes": self.hand_over.summed("early_bytes"),
            "codes": [str(rank.facts["code"]) for rank in self.hand_over.decode_ranks if rank.facts.get("code")],
            "total_s": self.total_s,
            "named_s": self.named_s,
            "unexplained_s": self.unexplained_s,
            "unexplained_part": self.unexplained_part,
            "measured_s": self.measured_s,
            "clock_uncertainty_s": self.uncertainty_s,
            "spans": [_values(span) for span in self.spans],
            "side_spans": [_values(span) for span in self.side_spans],
        }


def _values(span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "where": span.where,
        "begin_s": span.begin_s,
        "duration_s": span.duration_s,
        "is_named": span.is_named,
    }


@final
@dataclass(slots=True)
class _Axis:
    """Moments of all processes on one axis: that of decode's scheduler, from the beginning on."""

    clocks: Clocks
    reference: str
    uncertainty_s: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    zero_s: float = 0.0

    def place(self, told: Told, moment_s: float) -> float | None:
        """Return a moment on the axis; None if the process's clock cannot be aligned."""
        found = self.clocks.difference(self.reference, told.clock)
        self.uncertainty_s[told.clock] = None if found is None else found[1]
        return None if found is None else moment_s - found[0] - self.zero_s


def make_timeline(hand_over: HandOver, clocks: Clocks, *, measured_s: float | None = None) -> Timeline:
    """Return a hand-over's timeline.

    Args:
        hand_over: The hand-over.
        clocks: Those of its processes.
        measured_s: Time to the first token as a client has measured it, None if none has.
    """
    axis = _Axis(clocks, hand_over.decode.clock)
    told = {"prefill": hand_over.prefill, "decode": hand_over.decode, "rank": hand_over.slowest_rank()}
    axis.zero_s = _beginning(told, axis)
    spans = _spans(_steps(hand_over, told, axis), told, axis)
    return Timeline(hand_over, tuple(spans), tuple(_side_spans(hand_over, axis)), axis.uncertainty_s, measured_s)


def _beginning(told: dict[str, Told | None], axis: _Axis) -> float:
    """Return the first moment that is known: the prompt's arrival at prefill's frontend, or else at decode's."""
    for each in (told["prefill"], told["decode"]):
        entered_s = each.entered_s() if each is not None else None
        placed_s = axis.place(each, entered_s) if each is not None and entered_s is not None else None
        if placed_s is not None:
            return placed_s
    return 0.0


def _steps(hand_over: HandOver, told: dict[str, Told | None], axis: _Axis) -> tuple[Step, ...]:
    posted_s, answered_s = _moment(told["rank"], "posted", axis), _moment(told["prefill"], "answered", axis)
    was_finished = posted_s is not None and answered_s is not None and posted_s > answered_s
    return steps_of(hand_over, was_finished=was_finished)


def _spans(steps: tuple[Step, ...], told: dict[str, Told | None], axis: _Axis) -> list[Span]:
    spans: list[Span] = []
    decode, prefill = told["decode"], told["prefill"]
    has_read = decode is not None and "ordered" in decode.moments
    last_s, missing = 0.0, list[str]()
    for process, stage, name in steps:
        each = told[process]
        if process == "prefill" and prefill is None:
            continue
        at_s = _moment(each, stage, axis)
        if at_s is None:
            if _is_due(process, stage, has_read=has_read):
                missing.append(name)
            continue
        # Where clocks are uncertain, a moment may seem to come before the one that it followed.
        at_s = max(at_s, last_s)
        where = _place(process, stage, told)
        if stage == _OUTSIDE and prefill is None:
            last_s = at_s
            continue
        if missing:
            spans.append(Span("not told: " + ", ".join([*missing, name]), where, last_s, at_s - last_s, is_named=False))
        else:
            spans.append(Span(name, where, last_s, at_s - last_s))
        last_s, missing = at_s, []
    return spans


def _place(process: str, stage: str, told: dict[str, Told | None]) -> str:
    """Return where a span was spent; a decode rank sees the end of the prompt's computation, which prefill spent."""
    if stage == _OUTSIDE:
        return "outside"
    if stage == "whole" and told["prefill"] is not None:
        process = "prefill"
    return _where("decode" if process == "rank" else process, told[process])


def _moment(told: Told | None, stage: str, axis: _Axis) -> float | None:
    if told is None:
        return None
    moment_s = told.entered_s() if stage == _OUTSIDE else told.moments.get(stage)
    return None if moment_s is None else axis.place(told, moment_s)


def _is_due(process: str, stage: str, *, has_read: bool) -> bool:
    """Tell whether a stage must have been reached: reads are not made for full prefix hits, nor peers met twice."""
    if stage in _FIRST_CONTACT:
        return False
    return has_read or not (process == "rank" or stage in _OF_A_READ)


def _where(engine: str, told: Told | None) -> str:
    return engine if told is None else f"{engine} {told.part}"


def _side_spans(hand_over: HandOver, axis: _Axis) -> list[Span]:
    found: list[Span] = []
    slowest = hand_over.slowest_rank()
    for rank in hand_over.decode_ranks:
        if rank is not slowest:
            found += _side("decode", rank, ("ordered", "completed"), "read of another rank", axis)
    if hand_over.is_streamed and hand_over.prefill is not None:
        found += _side("decode", hand_over.decode, ("arrived", "allocated"), "wait for the offer, and for blocks", axis)
        for rank in hand_over.decode_ranks:
            found += _side("decode", rank, ("posted", "whole"), "read while the prompt is computed", axis)
    for source in hand_over.prefill_ranks:
        found += _side("prefill", source, ("granted", "read"), "lease, until its reader is done", axis)
        found += _side("prefill", source, ("read", "freed"), "void the fence, give the blocks back", axis)
    return found


def _side(engine: str, told: Told, stages: tuple[str, str], name: str, axis: _Axis) -> list[Span]:
    begin_s, end_s = [_moment(told, stage, axis) for stage in stages]
    if begin_s is None or end_s is None:
        return []
    return [Span(name, _where(engine, told), begin_s, max(0.0, end_s - begin_s))]
