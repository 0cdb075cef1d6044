"""Timeline of one hand-over: spans from the prompt's arrival at prefill to the first token of decode.

Each process stamps moments by its own clock. The command exchanges a message with each process, which aligns that process with
the command's machine. Between two machines, messages of the hand-over itself (ticket or offer, orders, reports, "read complete")
bound the difference of the clocks from both sides: the middle is taken, and half of the width is the uncertainty.

Example: a ticket is written at 10.000 s of P's machine and arrives at 3.002 s of D's, so D - P is at most -6.998 s. "Read
complete" leaves at 3.004 s of D's and arrives at 10.008 s of P's, so D - P is at least -7.004 s: D is 7.001 s behind, +- 0.003 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm_adapter.observe.answers import Answer, HandOverEntry

__all__ = ["HandOver", "Record", "Span", "Timeline", "join_hand_overs", "make_timeline"]

Step = tuple[str, str, str]
"""(process, stage at which the span ends, name)."""
_COMPUTED: tuple[Step, ...] = (
    ("prefill", "arrived", "tokenize, pass on to the scheduler"),
    ("prefill", "scheduled", "wait in the queue"),
    ("prefill", "answered", "compute the prompt, write the ticket"),
)
_ADMITTED: tuple[Step, ...] = (
    ("decode", "entered", "router and HTTP"),
    ("decode", "arrived", "tokenize, pass on to the scheduler"),
)
_POSTED: tuple[Step, ...] = (
    ("rank", "ordered", "order to the rank"),
    ("rank", "told", "handshake (first contact)"),
    ("rank", "planned", "plan, prepare lists (first contact)"),
    ("rank", "posted", "number the blocks"),
)
_READ: tuple[Step, ...] = (("rank", "started", "wait for a place on the wire"), ("rank", "data", "read"))
_TAKEN: tuple[Step, ...] = (
    ("rank", "fence", "check the fence"),
    ("rank", "taken", "wait for the engine's step"),
    ("rank", "completed", "put pages in order"),
    ("decode", "reported", "report to the scheduler"),
    ("decode", "scheduled", "wait for a step"),
    ("decode", "first_token", "first decode step"),
)
_LAST_BLOCKS: Step = ("rank", "data", "read the last blocks")
_PLAIN = (*_COMPUTED, *_ADMITTED, ("decode", "allocated", "wait for blocks"), *_POSTED, *_READ, *_TAKEN)
# The router asked both engines at once, and nothing was read before the prompt was finished.
_EARLY = (*_COMPUTED, ("decode", "allocated", "wait for the ticket, and for blocks"), *_POSTED, *_READ, *_TAKEN)
# The decode engine read while the prefill engine computed: the wait for blocks and the first reads delay nothing.
_STREAMED = (*_COMPUTED[:2], ("rank", "whole", "compute the prompt, which is read meanwhile"), _LAST_BLOCKS, *_TAKEN)
_FIRST_CONTACT = frozenset({"told", "planned"})
_OF_A_READ = frozenset({"allocated", "reported"})


@final
@dataclass(slots=True)
class Record:
    """One process's record of a hand-over.

    Attributes:
        engine_id: Its engine.
        part: Its part of the engine: `scheduler`, or a rank as `0.1`.
        machine: The command that asked it, whose clock `moments` are read by; its own name where that is not known.
        uncertainty_s: Uncertainty of its clock against that machine's.
        facts: The entry of its answer.
        moments: Seconds by stage.
    """

    engine_id: str
    part: str
    machine: str
    uncertainty_s: float
    facts: HandOverEntry
    moments: dict[str, float]

    @property
    def process(self) -> str:
        """Name of the process."""
        return f"{self.engine_id}/{self.part}"

    @property
    def request_id(self) -> str:
        """The engine's own request."""
        return self.facts.get("request_id") or ""


@final
@dataclass(frozen=True, slots=True)
class HandOver:
    """A hand-over as far as processes remember it; `prefill` is None if that scheduler was not asked, or has forgotten."""

    decode: Record
    prefill: Record | None
    decode_ranks: list[Record]
    prefill_ranks: list[Record]

    @property
    def records(self) -> list[Record]:
        """All records, the decode engine's first."""
        return [self.decode, *self.decode_ranks, *([self.prefill] if self.prefill else []), *self.prefill_ranks]

    @property
    def peer(self) -> dict[str, object]:
        """Ids of the prefill engine and its request."""
        facts = self.decode.facts
        return {"engine_id": facts.get("peer_engine_id"), "request_id": facts.get("peer_request_id")}

    def slowest_rank(self) -> Record | None:
        """Return the rank whose read took longest; the request waits for that one."""
        return max(
            self.decode_ranks,
            key=lambda rank: rank.moments.get("completed", 0.0) - rank.moments.get("ordered", 0.0),
            default=None,
        )


def join_hand_overs(answers: Iterable[Answer]) -> list[HandOver]:
    """Return the hand-overs that the answers contain, the latest last."""
    records = [record for answer in answers for record in _records(answer)]
    found: list[HandOver] = []
    for decode in records:
        peer = decode.facts.get("peer_engine_id"), decode.facts.get("peer_request_id")
        if decode.part != "scheduler" or decode.facts.get("role") != "consumer" or not peer[1]:
            continue
        here = decode.engine_id, decode.request_id
        readers = [each for each in records if (each.engine_id, each.request_id) == here]
        sources = [each for each in records if (each.engine_id, each.request_id) == peer]
        ranks = [each for each in readers if each.part != "scheduler" and each.facts.get("role") == "consumer"]
        source_ranks = [each for each in sources if each.part != "scheduler" and each.facts.get("role") == "producer"]
        prefill = [each for each in sources if each.part == "scheduler" and each.facts.get("role") == "producer"]
        found.append(HandOver(decode, prefill[0] if prefill else None, ranks, source_ranks))
    return sorted(found, key=lambda each: each.decode.moments.get("arrived", 0.0))


def _records(answer: Answer) -> Iterator[Record]:
    """Yield an answer's hand-overs, their moments by the clock of the command that asked."""
    engine_id, part = str(answer.get("engine_id", "")), str(answer.get("part", ""))
    machine, ahead_s, uncertainty_s = f"{engine_id}/{part}", 0.0, 0.0
    asked_s, heard_s = answer.get("asked_s"), answer.get("heard_s")
    answered_s, received_s = answer.get("answered_s"), answer.get("received_s")
    if asked_s is not None and heard_s is not None and answered_s is not None and received_s is not None:
        machine = answer.get("desk") or "command"
        ahead_s = ((heard_s - asked_s) + (answered_s - received_s)) / 2
        uncertainty_s = abs((received_s - asked_s) - (answered_s - heard_s)) / 2
    for entry in answer.get("hand_overs") or ():
        moments = {stage: at_s - ahead_s for stage, at_s in entry["moments"].items() if at_s is not None}
        if "arrived" in moments:
            moments["entered"] = moments["arrived"] - (entry.get("frontend_s") or 0.0)
        yield Record(engine_id, part, machine, uncertainty_s, entry, moments)


def _messages(hand_over: HandOver) -> Iterator[tuple[Record, float, Record, float]]:
    """Yield (sender, when it sent, receiver, when that received) of the messages of a hand-over."""
    decode, prefill = hand_over.decode, hand_over.prefill
    pairs: list[tuple[Record, str, Record, str]] = []
    for rank in hand_over.decode_ranks:
        pairs += [(decode, "ordered", rank, "ordered"), (rank, "completed", decode, "reported")]
        pairs += [(rank, "data", source, "read") for source in hand_over.prefill_ranks]
    if prefill is not None:
        for source in hand_over.prefill_ranks:
            pairs += [(prefill, "answered", source, "granted"), (source, "freed", prefill, "freed")]
        # Where the router asked both engines at once, no ticket passes through it; an offer comes from the first step on.
        is_early = decode.facts.get("is_early")
        pairs.append(
            (prefill, "scheduled", decode, "allocated") if is_early else (prefill, "answered", decode, "entered")
        )
    for sender, sent, receiver, received in pairs:
        if sent in sender.moments and received in receiver.moments:
            yield sender, sender.moments[sent], receiver, receiver.moments[received]


def _aligned_machines(hand_over: HandOver) -> dict[str, tuple[float, float]]:
    """Return by how much each machine's clock is ahead of that of decode's scheduler, and with what uncertainty (seconds)."""
    found = {hand_over.decode.machine: (0.0, 0.0)}
    messages = list(_messages(hand_over))
    for machine in dict.fromkeys(record.machine for record in hand_over.records):
        most_s: list[float] = []
        least_s: list[float] = []
        for sender, sent_s, receiver, received_s in messages:
            if receiver.machine == machine and sender.machine in found:
                most_s.append(received_s - sent_s + found[sender.machine][0])
            if sender.machine == machine and receiver.machine in found:
                least_s.append(sent_s - received_s + found[receiver.machine][0])
        if machine not in found and most_s and least_s:
            found[machine] = (min(most_s) + max(least_s)) / 2, abs(min(most_s) - max(least_s)) / 2
    return found


@final
@dataclass(frozen=True, slots=True)
class Span:
    """A part of the time to the first token.

    Attributes:
        name: The activity; of an unnamed span, which moments are missing.
        where: `prefill` or `decode` with the part of that engine, as `decode 0.1`; `outside` between the two.
        begin_s: Seconds from the beginning.
        duration_s: Its length.
        is_named: Whether the moment at its end is known.
    """

    name: str
    where: str
    begin_s: float
    duration_s: float
    is_named: bool = True


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """All spans of a hand-over, as plain values.

    Attributes:
        decode: Ids of the engine and the request.
        prefill: The same, and whether that engine's scheduler was asked and remembers.
        tokens: Tokens of the prompt.
        bytes: Bytes that were read.
        is_streamed: Whether the prompt was read while it was computed.
        early_bytes: The part of the bytes that arrived meanwhile.
        codes: Codes of the reads that failed.
        measured_s: Time to the first token as a client measured it.
        total_s: The same, or else as far as the engines see it.
        named_s: Sum of the named spans.
        unexplained_s: The rest; of a client that measured less than the spans cover, by how much it did.
        unexplained_part: The same as a part of the whole.
        clock_uncertainty_s: Of each process's clock against decode's scheduler; None where they cannot be compared.
        spans: In order, without gaps. Time before a missing moment belongs to an unnamed span.
        side_spans: Spans beside the way to the first token: the other ranks' reads, the lease at prefill.
    """

    decode: dict[str, str]
    prefill: dict[str, object]
    tokens: float | None
    bytes: int
    is_streamed: bool
    early_bytes: int
    codes: list[str]
    measured_s: float | None
    total_s: float
    named_s: float
    unexplained_s: float
    unexplained_part: float
    clock_uncertainty_s: dict[str, float | None]
    spans: list[Span]
    side_spans: list[Span]


def make_timeline(hand_over: HandOver, *, measured_s: float | None = None) -> Timeline:
    """Return a hand-over's timeline.

    The moments of its records become seconds from the beginning; those of a machine that cannot be aligned are dropped.

    Args:
        hand_over: The hand-over.
        measured_s: Time to the first token that a client measured.
    """
    machines = _aligned_machines(hand_over)
    decode, prefill, ranks = hand_over.decode, hand_over.prefill, hand_over.decode_ranks
    first = prefill if prefill is not None and prefill.machine in machines and "entered" in prefill.moments else decode
    zero_s = first.moments.get("entered", 0.0) - machines[first.machine][0]
    uncertainty_s: dict[str, float | None] = {}
    for record in hand_over.records:
        ahead_s, about_s = machines.get(record.machine, (0.0, None))
        moments = record.moments if about_s is not None else {}
        record.moments = {stage: at_s - ahead_s - zero_s for stage, at_s in moments.items()}
        uncertainty_s[record.process] = (
            None if about_s is None else about_s + record.uncertainty_s + decode.uncertainty_s
        )
    uncertainty_s[decode.process] = 0.0
    spans = list(_spans(hand_over))
    total_s = sum(span.duration_s for span in spans) if measured_s is None else measured_s
    named_s = sum(span.duration_s for span in spans if span.is_named)
    return Timeline(
        {"engine_id": decode.engine_id, "request_id": decode.request_id},
        {**hand_over.peer, "is_known": prefill is not None},
        decode.facts.get("tokens"),
        sum(int(rank.facts.get("bytes") or 0) for rank in ranks),
        bool(decode.facts.get("is_streamed")),
        sum(int(rank.facts.get("early_bytes") or 0) for rank in ranks),
        [code for rank in ranks if (code := rank.facts.get("code"))],
        measured_s,
        total_s,
        named_s,
        abs(total_s - named_s),
        abs(total_s - named_s) / total_s if total_s > 0 else 0.0,
        uncertainty_s,
        spans,
        list(_side_spans(hand_over)),
    )


def _steps(hand_over: HandOver) -> tuple[Step, ...]:
    """Return the steps for which the first token waited, in order."""
    decode, prefill, rank = hand_over.decode, hand_over.prefill, hand_over.slowest_rank()
    if not decode.facts.get("is_early"):
        return _PLAIN
    answered_s = prefill.moments.get("answered") if prefill is not None else None
    posted_s = rank.moments.get("posted") if rank is not None else None
    was_finished = answered_s is not None and posted_s is not None and posted_s > answered_s
    return _EARLY if was_finished or not decode.facts.get("is_streamed") else _STREAMED


def _spans(hand_over: HandOver) -> Iterator[Span]:
    records = {"prefill": hand_over.prefill, "decode": hand_over.decode, "rank": hand_over.slowest_rank()}
    has_read = "ordered" in hand_over.decode.moments
    last_s, missing = 0.0, list[str]()
    for process, stage, name in _steps(hand_over):
        record = records[process]
        if hand_over.prefill is None and (process == "prefill" or stage == "entered"):
            continue
        at_s = record.moments.get(stage) if record is not None else None
        if at_s is None:
            # A full prefix hit is not read, and no peer is met twice.
            if stage not in _FIRST_CONTACT and (has_read or not (process == "rank" or stage in _OF_A_READ)):
                missing.append(name)
            continue
        # Where clocks are uncertain, a moment may seem to come before the one that it followed.
        at_s = max(at_s, last_s)
        label = f"not told: {', '.join([*missing, name])}" if missing else name
        yield Span(label, _place(process, stage, records), last_s, at_s - last_s, is_named=not missing)
        last_s, missing = at_s, []


def _place(process: str, stage: str, records: dict[str, Record | None]) -> str:
    """Return where a span was spent; a decode rank sees the end of the prompt's computation, which prefill spent."""
    if stage == "entered":
        return "outside"
    if stage == "whole" and records["prefill"] is not None:
        process = "prefill"
    record = records[process]
    return f"{'decode' if process == 'rank' else process} {record.part if record is not None else ''}"


def _side_spans(hand_over: HandOver) -> Iterator[Span]:
    slowest, is_streamed = hand_over.slowest_rank(), hand_over.decode.facts.get("is_streamed")
    beside = [("decode", rank, "ordered", "completed", "read of another rank") for rank in hand_over.decode_ranks]
    beside = [each for each in beside if each[1] is not slowest]
    if is_streamed and hand_over.prefill is not None:
        beside.append(("decode", hand_over.decode, "arrived", "allocated", "wait for the offer, and for blocks"))
        for rank in hand_over.decode_ranks:
            beside.append(("decode", rank, "posted", "whole", "read while the prompt is computed"))
    for source in hand_over.prefill_ranks:
        beside.append(("prefill", source, "granted", "read", "lease, until its reader is done"))
        beside.append(("prefill", source, "read", "freed", "void the fence, give the blocks back"))
    for engine, record, begin, end, name in beside:
        if begin in record.moments and end in record.moments:
            begin_s, end_s = record.moments[begin], record.moments[end]
            yield Span(name, f"{engine} {record.part}", begin_s, max(0.0, end_s - begin_s))
