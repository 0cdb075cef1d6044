"""Hand-overs put together from the answers of both engines' processes, and the clocks of these aligned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.cli.clocks import Clocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm_adapter.cli.asking import Answer

__all__ = ["HandOver", "Told", "align", "join_hand_overs"]

_NEIGHBOURS_S = 10.0
"""Hand-overs of the same engines so near in time help to align the clocks; later ones would blur them by drift."""


_EXCHANGE = ("asked_s", "heard_s", "answered_s", "received_s")
"""Readings of a command's clock and of a process's, in turn."""


@final
@dataclass(frozen=True, slots=True)
class Told:
    """Memory that a process has of a hand-over.

    Attributes:
        engine_id: Its engine.
        part: Its part of the engine: `scheduler`, or a rank as `0.1`.
        facts: Plain values that it tells along.
        moments: Seconds of its own clock by stage.
    """

    engine_id: str
    part: str
    facts: dict[str, Any]
    moments: dict[str, float]

    @property
    def clock(self) -> str:
        """Name of the process's clock."""
        return f"{self.engine_id}/{self.part}"

    @property
    def request_id(self) -> str:
        """The engine's own request."""
        return str(self.facts.get("request_id", ""))

    def entered_s(self) -> float | None:
        """Return when the engine's frontend began with the request, by this process's clock."""
        arrived_s = self.moments.get("arrived")
        return None if arrived_s is None else arrived_s - float(self.facts.get("frontend_s") or 0.0)


@final
@dataclass(frozen=True, slots=True)
class HandOver:
    """A hand-over as far as processes remember it.

    Attributes:
        decode: Of the decode engine's scheduler.
        prefill: Of the prefill engine's scheduler; None if that engine was not asked or has forgotten.
        decode_ranks: Of the ranks that read.
        prefill_ranks: Of the ranks that were read from.
    """

    decode: Told
    prefill: Told | None = None
    decode_ranks: list[Told] = field(default_factory=list[Told])
    prefill_ranks: list[Told] = field(default_factory=list[Told])

    @property
    def is_early(self) -> bool:
        """Whether the router asked both engines at once."""
        return bool(self.decode.facts.get("is_early"))

    @property
    def is_streamed(self) -> bool:
        """Whether the prompt was read by its progress, and not from a final ticket."""
        return bool(self.decode.facts.get("is_streamed"))

    def summed(self, fact: str) -> int:
        """Return the sum of a number that each decode rank tells."""
        return sum(int(rank.facts.get(fact) or 0) for rank in self.decode_ranks)

    def slowest_rank(self) -> Told | None:
        """Return the rank whose read ended last in its own report; the request waits for that one."""
        return max(self.decode_ranks, key=_read_s, default=None)


def _read_s(rank: Told) -> float:
    return rank.moments.get("completed", 0.0) - rank.moments.get("ordered", 0.0)


def join_hand_overs(answers: Iterable[Answer]) -> list[HandOver]:
    """Return the hand-overs that the answers tell of, the latest last, by the clock of the decode engine's scheduler."""
    told = list(_all_told(answers))
    consumers = [each for each in told if each.facts.get("role") == "consumer"]
    producers = [each for each in told if each.facts.get("role") == "producer"]
    found = [
        _joined(decode, consumers, producers)
        for decode in consumers
        if decode.part == "scheduler" and decode.facts.get("peer_request_id")
    ]
    return sorted(found, key=lambda each: each.decode.moments.get("arrived", 0.0))


def _all_told(answers: Iterable[Answer]) -> Iterator[Told]:
    for answer in answers:
        for entry in answer.get("hand_overs") or ():
            facts = {name: value for name, value in entry.items() if name != "moments"}
            moments = {stage: float(at_s) for stage, at_s in entry["moments"].items() if at_s is not None}
            yield Told(str(answer.get("engine_id", "")), str(answer.get("part", "")), facts, moments)


def _joined(decode: Told, consumers: Sequence[Told], producers: Sequence[Told]) -> HandOver:
    peer = str(decode.facts.get("peer_engine_id", "")), str(decode.facts["peer_request_id"])
    ranks = [
        each
        for each in consumers
        if each.part != "scheduler" and (each.engine_id, each.request_id) == (decode.engine_id, decode.request_id)
    ]
    sources = [each for each in producers if (each.engine_id, each.request_id) == peer]
    prefill = next((each for each in sources if each.part == "scheduler"), None)
    return HandOver(decode, prefill, ranks, [each for each in sources if each.part != "scheduler"])


def align(hand_over: HandOver, hand_overs: Iterable[HandOver], answers: Iterable[Answer]) -> Clocks:
    """Return the clocks of a hand-over's processes.

    Each process was asked over its socket, which is a message to it and one back; the hand-over is itself a chain of
    messages, and so are its neighbours in time.

    Args:
        hand_over: The one to show.
        hand_overs: All that are known.
        answers: Of the processes, with the times at which they were asked and heard.
    """
    clocks = Clocks()
    wanted = {told.clock for told in _processes(hand_over)}
    for answer in answers:
        clock = f"{answer.get('engine_id', '')}/{answer.get('part', '')}"
        asked_s, heard_s, answered_s, received_s = (answer.get(name) for name in _EXCHANGE)
        desk = str(answer.get("desk", "command"))
        if clock in wanted and asked_s is not None and heard_s is not None:
            clocks.before(desk, asked_s, clock, heard_s)
        if clock in wanted and answered_s is not None and received_s is not None:
            clocks.before(clock, answered_s, desk, received_s)
    at_s = hand_over.decode.moments.get("arrived", 0.0)
    for other in hand_overs:
        near = abs(other.decode.moments.get("arrived", 0.0) - at_s) < _NEIGHBOURS_S
        if other is hand_over or (near and {told.clock for told in _processes(other)} <= wanted):
            _take_messages(clocks, other)
    return clocks


def _processes(hand_over: HandOver) -> list[Told]:
    first = [hand_over.prefill] if hand_over.prefill is not None else []
    return [*first, hand_over.decode, *hand_over.decode_ranks, *hand_over.prefill_ranks]


def _take_messages(clocks: Clocks, hand_over: HandOver) -> None:
    """Take in the messages of a hand-over: ticket or offer, orders down, reports up, "read complete"."""
    decode, prefill = hand_over.decode, hand_over.prefill
    for rank in hand_over.decode_ranks:
        _message(clocks, decode, "ordered", rank, "ordered")
        _message(clocks, rank, "completed", decode, "reported")
        for source in hand_over.prefill_ranks:
            _message(clocks, rank, "data", source, "read")
    if prefill is None:
        return
    for source in hand_over.prefill_ranks:
        _message(clocks, prefill, "answered", source, "granted")
        _message(clocks, source, "freed", prefill, "freed")
    if hand_over.is_early:  # no ticket reaches the decode engine over the router; an offer comes from the first step on
        _message(clocks, prefill, "scheduled", decode, "allocated")
        return
    entered_s, answered_s = decode.entered_s(), prefill.moments.get("answered")
    if entered_s is not None and answered_s is not None:
        clocks.before(prefill.clock, answered_s, decode.clock, entered_s)


def _message(clocks: Clocks, sender: Told, sent: str, receiver: Told, heard: str) -> None:
    if sent in sender.moments and heard in receiver.moments:
        clocks.before(sender.clock, sender.moments[sent], receiver.clock, receiver.moments[heard])
