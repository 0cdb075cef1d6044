"""`vllm-adapter trace`: one hand-over's timeline, put together from what both engines remember of it.

Spans go from the prompt's arrival at prefill to the first token of decode. Each process stamps moments by its own clock. The
command exchanges a message with each process, which aligns that process with the command's machine. Between two machines,
messages of the hand-over itself (ticket or offer, orders, reports, "read complete") bound the difference of the clocks from both
sides: the middle is taken, and half of the width is the uncertainty.

Example: a ticket is written at 10.000 s of P's machine and arrives at 3.002 s of D's, so D - P is at most -6.998 s. "Read
complete" leaves at 3.004 s of D's and arrives at 10.008 s of P's, so D - P is at least -7.004 s: D is 7.001 s behind, +- 0.003 s.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, final

import typer

from vllm_adapter.cli.engines import NO_ENGINE, ask_all, engine_names
from vllm_adapter.cli.values import Folder, Json, json_text, read_json, say, within
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.answers import Answer, HandOverEntry
from vllm_adapter.observe.recorder import plain_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["HandOver", "Record", "trace", "join_hand_overs", "make_timeline", "timeline_text"]

_MOST_UNEXPLAINED = 0.05
"""Part of the time to the first token that may stay without a name."""
_UNEXPLAINED, _NOT_FOUND = 1, 3
_TTFT = within(1e-6, 3600, "s")
_BAR_COLUMNS = 28

Step = tuple[str, str, str]
"""(process, stage at which the span ends, name)."""
_COMPUTED: tuple[Step, ...] = (
    ("prefill", "arrived", "tokenize, pass on to the scheduler"),
    ("prefill", "scheduled", "wait in the queue"),
    ("prefill", "answered", "compute the prompt, write the ticket"),
)
_READ: tuple[Step, ...] = (
    ("rank", "ordered", "order to the rank"),
    ("rank", "connected", "handshake (first contact)"),
    ("rank", "planned", "plan, prepare lists (first contact)"),
    ("rank", "posted", "number the blocks"),
    ("rank", "started", "wait for a place on the wire"),
    ("rank", "data", "read"),
)
_TAKEN: tuple[Step, ...] = (
    ("rank", "fence", "check the fence"),
    ("rank", "taken", "wait for the engine's step"),
    ("rank", "completed", "put pages in order"),
    ("decode", "reported", "report to the scheduler"),
    ("decode", "scheduled", "wait for a step"),
    ("decode", "first_token", "first decode step"),
)
_PLAIN: tuple[Step, ...] = (
    *_COMPUTED,
    ("decode", "entered", "router and HTTP"),
    ("decode", "arrived", "tokenize, pass on to the scheduler"),
    ("decode", "allocated", "wait for blocks"),
    *_READ,
    *_TAKEN,
)
# The router asked both engines at once, and nothing was read before the prompt was finished.
_EARLY: tuple[Step, ...] = (*_COMPUTED, ("decode", "allocated", "wait for the ticket, and for blocks"), *_READ, *_TAKEN)
# The decode engine read while the prefill engine computed: the wait for blocks and the first reads delay nothing.
_STREAMED: tuple[Step, ...] = (
    *_COMPUTED[:2],
    ("rank", "whole", "compute the prompt, which is read meanwhile"),
    ("rank", "data", "read the last blocks"),
    *_TAKEN,
)


@final
@dataclass(slots=True)
class Record:
    """One process's record of a hand-over.

    Attributes:
        ids: Ids of the engine and of its own request.
        part: Its part of the engine: `scheduler`, or a rank as `0.1`.
        machine: The command that asked it, whose clock `moments` are read by; its own name where that is not known.
        uncertainty_s: Uncertainty of its clock against that machine's.
        facts: The entry of its answer.
        moments: Seconds by stage.
    """

    ids: dict[str, object]
    part: str
    machine: str
    uncertainty_s: float
    facts: HandOverEntry
    moments: dict[str, float]


@final
@dataclass(frozen=True, slots=True)
class HandOver:
    """A hand-over as far as processes remember it.

    Attributes:
        decode: Record of the decode engine's scheduler.
        prefill: That of prefill's; None if it was not asked, or has forgotten.
        decode_ranks: Records of decode's ranks.
        prefill_ranks: Those of prefill's ranks.
        slowest: The rank of decode whose read took longest; the request waits for that one.
        ids: Ids of engine and request, by `decode` and `prefill`.
    """

    decode: Record
    prefill: Record | None
    decode_ranks: list[Record]
    prefill_ranks: list[Record]
    slowest: Record | None
    ids: dict[str, dict[str, object]]

    @property
    def records(self) -> list[Record]:
        """All records, the decode engine's first."""
        prefill = [self.prefill] if self.prefill is not None else []
        return [self.decode, *self.decode_ranks, *prefill, *self.prefill_ranks]


def join_hand_overs(answers: Iterable[Answer]) -> list[HandOver]:
    """Return the hand-overs that the answers contain, the latest last."""
    records = [record for answer in answers for record in _records(answer)]
    found: list[HandOver] = []
    for decode in records:
        facts = decode.facts
        if decode.part != "scheduler" or facts.get("role") != "consumer" or not facts.get("peer_request_id"):
            continue
        peer: dict[str, object] = {"engine_id": facts.get("peer_engine_id"), "request_id": facts.get("peer_request_id")}
        sources = [each for each in records if each.ids == peer and each.facts.get("role") == "producer"]
        readers = [each for each in records if each.ids == decode.ids and each.facts.get("role") == "consumer"]
        prefill = next((each for each in sources if each.part == "scheduler"), None)
        ranks, lenders = ([each for each in side if each.part != "scheduler"] for side in (readers, sources))
        reads_s = [each.moments.get("completed", 0.0) - each.moments.get("ordered", 0.0) for each in ranks]
        slowest = ranks[reads_s.index(max(reads_s))] if ranks else None
        found.append(HandOver(decode, prefill, ranks, lenders, slowest, {"decode": decode.ids, "prefill": peer}))
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
        ids: dict[str, object] = {"engine_id": engine_id, "request_id": entry.get("request_id") or ""}
        yield Record(ids, part, machine, uncertainty_s, entry, moments)


def _messages(hand_over: HandOver) -> Iterator[tuple[Record, str, Record, str]]:
    """Yield (sender, its stage, receiver, its stage) of the messages of a hand-over."""
    decode, prefill = hand_over.decode, hand_over.prefill
    for rank in hand_over.decode_ranks:
        yield from ((decode, "ordered", rank, "ordered"), (rank, "completed", decode, "reported"))
        yield from ((rank, "data", source, "read") for source in hand_over.prefill_ranks)
    if prefill is not None:
        for source in hand_over.prefill_ranks:
            yield from ((prefill, "answered", source, "granted"), (source, "freed", prefill, "freed"))
        # Where the router asked both engines at once, no ticket passes through it; an offer comes from the first step on.
        is_early = decode.facts.get("is_early")
        yield (prefill, "scheduled", decode, "allocated") if is_early else (prefill, "answered", decode, "entered")


def _aligned_machines(hand_over: HandOver) -> dict[str, tuple[float, float]]:
    """Return by how much each machine's clock is ahead of that of decode's scheduler, and with what uncertainty (seconds)."""
    found = {hand_over.decode.machine: (0.0, 0.0)}
    messages = [
        (sender, sender.moments[sent], receiver, receiver.moments[received])
        for sender, sent, receiver, received in _messages(hand_over)
        if sent in sender.moments and received in receiver.moments
    ]
    for machine in dict.fromkeys(record.machine for record in hand_over.records):
        most_s, least_s = list[float](), list[float]()
        for sender, sent_s, receiver, received_s in messages:
            if receiver.machine == machine and sender.machine in found:
                most_s.append(received_s - sent_s + found[sender.machine][0])
            if sender.machine == machine and receiver.machine in found:
                least_s.append(sent_s - received_s + found[receiver.machine][0])
        if machine not in found and most_s and least_s:
            found[machine] = (min(most_s) + max(least_s)) / 2, abs(min(most_s) - max(least_s)) / 2
    return found


def make_timeline(hand_over: HandOver, *, measured_s: float | None = None) -> dict[str, Any]:
    """Return a hand-over's timeline, as `--json` prints it.

    The moments of its records become seconds from the beginning; those of a machine that cannot be aligned are dropped. A client
    that measured less than the spans cover leaves the difference unexplained, too. `spans` are in order, without gaps: time
    before a missing moment belongs to an unnamed span. `side_spans` are beside the way to the first token: the other ranks'
    reads, the lease at prefill. The uncertainty of a clock is against decode's scheduler; None where they cannot be compared.

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
        moments = {} if about_s is None else record.moments
        record.moments = {stage: at_s - ahead_s - zero_s for stage, at_s in moments.items()}
        own_s = 0.0 if record is decode else record.uncertainty_s + decode.uncertainty_s
        uncertainty_s[f"{record.ids['engine_id']}/{record.part}"] = None if about_s is None else about_s + own_s
    spans = list(_spans(hand_over))
    total_s = sum(span["duration_s"] for span in spans) if measured_s is None else measured_s
    named_s = sum(span["duration_s"] for span in spans if span["is_named"])
    unexplained_s = abs(total_s - named_s)
    return {
        **hand_over.ids,
        "prefill": {**hand_over.ids["prefill"], "is_known": prefill is not None},
        "tokens": decode.facts.get("tokens"),
        "bytes": sum(int(rank.facts.get("bytes") or 0) for rank in ranks),
        "is_streamed": bool(decode.facts.get("is_streamed")),
        "early_bytes": sum(int(rank.facts.get("early_bytes") or 0) for rank in ranks),
        "codes": [code for rank in ranks if (code := rank.facts.get("code"))],
        "measured_s": measured_s,
        "total_s": total_s,
        "named_s": named_s,
        "unexplained_s": unexplained_s,
        "unexplained_part": unexplained_s / total_s if total_s > 0 else 0.0,
        "clock_uncertainty_s": uncertainty_s,
        "spans": spans,
        "side_spans": list(_side_spans(hand_over)),
    }


def _span(name: str, where: str, begin_s: float, end_s: float, *, is_named: bool = True) -> dict[str, Any]:
    """Return a part of the time to the first token.

    Args:
        name: The activity; of an unnamed span, which moments are missing.
        where: `prefill` or `decode` with the part of that engine, as `decode 0.1`; `outside` between the two.
        begin_s: Seconds from the beginning.
        end_s: Its end; where clocks are uncertain, it may seem to come first.
        is_named: Whether the moment at its end is known.
    """
    times = {"begin_s": begin_s, "duration_s": max(0.0, end_s - begin_s)}
    return {"name": name, "where": where, **times, "is_named": is_named}


def _steps(hand_over: HandOver) -> tuple[Step, ...]:
    """Return the steps for which the first token waited, in order."""
    decode, prefill, rank = hand_over.decode, hand_over.prefill, hand_over.slowest
    if not decode.facts.get("is_early"):
        return _PLAIN
    answered_s = prefill.moments.get("answered") if prefill is not None else None
    posted_s = rank.moments.get("posted") if rank is not None else None
    was_finished = answered_s is not None and posted_s is not None and posted_s > answered_s
    return _EARLY if was_finished or not decode.facts.get("is_streamed") else _STREAMED


def _spans(hand_over: HandOver) -> Iterator[dict[str, Any]]:
    records = {"prefill": hand_over.prefill, "decode": hand_over.decode, "rank": hand_over.slowest}
    places = {name: f"{'decode' if name == 'rank' else name} {each.part}" for name, each in records.items() if each}
    has_read = "ordered" in hand_over.decode.moments
    last_s, missing = 0.0, list[str]()
    for process, stage, name in _steps(hand_over):
        record = records[process]
        if hand_over.prefill is None and (process == "prefill" or stage == "entered"):
            continue
        at_s = record.moments.get(stage) if record is not None else None
        if at_s is None:
            # A full prefix hit is not read, and a known peer needs no handshake.
            is_of_read = process == "rank" or stage in {"allocated", "reported"}
            if stage not in {"connected", "planned"} and (has_read or not is_of_read):
                missing.append(name)
            continue
        label = f"not recorded: {', '.join([*missing, name])}" if missing else name
        # A decode rank sees the end of the prompt's computation, which prefill spent.
        spent = "prefill" if stage == "whole" and hand_over.prefill is not None else process
        where = "outside" if stage == "entered" else places[spent]
        yield _span(label, where, last_s, at_s, is_named=not missing)
        last_s, missing = max(at_s, last_s), []


def _side_spans(hand_over: HandOver) -> Iterator[dict[str, Any]]:
    is_streamed = bool(hand_over.decode.facts.get("is_streamed")) and hand_over.prefill is not None
    ranks = hand_over.decode_ranks
    others = [each for each in ranks if each is not hand_over.slowest]
    for engine, records, begin, end, name in (
        ("decode", others, "ordered", "completed", "read of another rank"),
        ("decode", [hand_over.decode] * is_streamed, "arrived", "allocated", "wait for the offer, and for blocks"),
        ("decode", ranks * is_streamed, "posted", "whole", "read while the prompt is computed"),
        ("prefill", hand_over.prefill_ranks, "granted", "read", "lease, until its reader is done"),
        ("prefill", hand_over.prefill_ranks, "read", "freed", "void the fence, give the blocks back"),
    ):
        for record in records:
            if begin in record.moments and end in record.moments:
                yield _span(name, f"{engine} {record.part}", record.moments[begin], record.moments[end])


def trace(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Id at either engine, or a part of it.")] = "",
    *,
    lists: Annotated[bool, typer.Option("--list", help="List the hand-overs that the engines remember.")] = False,
    ttft: Annotated[
        float | None, typer.Option(metavar="SECONDS", callback=_TTFT, help="What a client measured.")
    ] = None,
    as_json: Json = False,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Write this machine's answers for --with.")] = None,
    others: Annotated[list[str] | None, typer.Option("--with", metavar="FILE", help="Saved answers to add.")] = None,
    folder: Folder = None,
) -> None:
    """Show one hand-over's timeline, put together from both engines.

    \b
    examples:
      vllm-adapter trace                      the latest hand-over
      vllm-adapter trace --list               the hand-overs that can be asked for
      vllm-adapter trace cmpl-4f --json

    \b
    exit codes:
      0  the timeline's named spans cover 95 % of the time to the first token, or more
      1  they do not
      2  wrong usage, or a file that cannot be read or written
      3  no such hand-over is remembered by the engines of this machine and user
    """  # noqa: D301 - a backslash keeps the lines of the help
    desk = f"command {os.uname().nodename} {os.getpid()} {time.monotonic_ns()}"
    saved = [cast("list[Answer]", read_json(file, list[Answer])) for file in others or ()]
    answers: list[Answer] = [{"desk": desk, **answer} for answer in ask_all(folder, request="trace")]
    if save:
        try:
            Path(save).write_text(json_text(answers), encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise AdapterError(f"{save} cannot be written: {error}", code="unwritable") from error
    answers += chain(*saved)
    for answer in answers:
        if "error" in answer:
            say("trace", f"{answer.get('socket', '')}: {answer['error']}")
    hand_overs = join_hand_overs(answers)
    if lists:
        print(json_text([each.ids for each in hand_overs], indent=2) if as_json else _list_text(hand_overs, answers))
        raise typer.Exit(0 if hand_overs else _NOT_FOUND)
    wanted = [each for each in hand_overs if any(request in str(ids["request_id"]) for ids in each.ids.values())]
    if not wanted:
        say("trace", _not_found(request, hand_overs, answers))
        raise typer.Exit(_NOT_FOUND)
    timeline = make_timeline(wanted[-1], measured_s=ttft)
    print(json_text(timeline, indent=2) if as_json else _named(timeline_text(timeline), answers))
    if timeline["unexplained_part"] > _MOST_UNEXPLAINED:
        raise typer.Exit(_UNEXPLAINED)


def _named(text: str, answers: Sequence[Answer]) -> str:
    """Return a text with the names of engines in place of their ids; of a UUID, that is role and side channel."""
    for engine_id, name in {str(answer.get("engine_id")): answer.get("name") for answer in answers}.items():
        text = text.replace(engine_id, name or engine_id)
    return text


def _not_found(request: str, hand_overs: Sequence[HandOver], answers: Sequence[Answer]) -> str:
    if hand_overs:
        return f"no hand-over is meant by {request!r}; `vllm-adapter trace --list` lists all {len(hand_overs)} that are known"
    engines = ", ".join(engine_names(answers))
    forgotten = f"no decode engine among {engines} remembers a hand-over: each remembers its last 128 since it started"
    return forgotten if engines else f"no live engine found. {NO_ENGINE}"


def timeline_text(timeline: Mapping[str, Any]) -> str:
    """Return the spans with a bar each, the part that is unexplained, and how certain the clocks are."""
    return "\n".join(map(plain_text, _lines(timeline)))


def _lines(timeline: Mapping[str, Any]) -> Iterator[str]:
    decode, prefill, size, early = (timeline[name] for name in ("decode", "prefill", "bytes", "early_bytes"))
    yield f"prefill  request {prefill['request_id']} of engine {prefill['engine_id']}"
    yield f"decode   request {decode['request_id']} of engine {decode['engine_id']}, {timeline['tokens']} tokens, {size} bytes"
    if timeline["is_streamed"]:
        share = f" ({early / size:.0%})" if size else ""
        yield f"streamed: {early} bytes{share} had arrived when the decode engine saw the end of the prompt's last step"
    yield from ("", f"  {'begins':>11}  {'takes':>11}   {'':{_BAR_COLUMNS}}  where and what")
    whole_s = sum(span["duration_s"] for span in timeline["spans"])
    for title, spans in ((), timeline["spans"]), (("", "  beside it"), timeline["side_spans"]):
        yield from title if spans else ()
        for span in spans:
            begin_s, took_s = span["begin_s"], span["duration_s"]
            times = f"{_ms(begin_s):>11}  {_ms(took_s):>11}   {_bar(begin_s, took_s, whole_s):{_BAR_COLUMNS}}"
            yield f"  {times}  {span['where']}: {span['name']}"
    part, named_s, total_s = (timeline[name] for name in ("unexplained_part", "named_s", "total_s"))
    whose = "as the engines see it" if timeline["measured_s"] is None else "as the client measured it"
    what = "is unexplained" if named_s <= total_s else "more than was measured"
    verdict = "" if part <= _MOST_UNEXPLAINED else f" (more than {_MOST_UNEXPLAINED:.0%})"
    named = f"named spans cover {_ms(named_s)}, {part:.1%} {what}{verdict}"
    yield from ("", f"time to the first token, {whose}: {_ms(total_s)}; {named}")
    if timeline["measured_s"] is None:
        yield "not seen by engines: the client's way to prefill's frontend, and the first token's way back; --ttft counts them"
    uncertain_s: dict[str, float | None] = timeline["clock_uncertainty_s"]
    if known := [(value, name) for name, value in uncertain_s.items() if value]:
        worst_s, worst = max(known)
        yield f"clocks aligned by messages: within {_ms(worst_s)} of {decode['engine_id']}/scheduler ({worst})"
    if unknown := [name for name, value in uncertain_s.items() if value is None]:
        yield f"no messages went both ways to {', '.join(unknown)}: its moments are left out"
    if not prefill["is_known"]:
        yield "the prefill engine was not asked, or has forgotten: run this on its machine with --save, then here --with"
    for code in timeline["codes"]:
        yield f"the read failed: {code}; its prompt was computed here, or refused"


def _bar(begin_s: float, duration_s: float, whole_s: float) -> str:
    """Return where a span lies in the whole. Example: a quarter in the middle of 8 columns is `   ##`."""
    if whole_s <= 0:
        return ""
    begin, end = (min(1.0, max(0.0, at_s / whole_s)) for at_s in (begin_s, begin_s + duration_s))
    first = min(_BAR_COLUMNS - 1, int(_BAR_COLUMNS * begin))
    last = max(first + 1, round(_BAR_COLUMNS * end))
    return " " * first + "#" * (last - first)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _list_text(hand_overs: Sequence[HandOver], answers: Sequence[Answer]) -> str:
    text = "{decode[engine_id]} {decode[request_id]} from {prefill[engine_id]} {prefill[request_id]}"
    known = [text.format(**each.ids) + ("" if each.prefill else " (not asked, or forgotten)") for each in hand_overs]
    return _named("\n".join(map(plain_text, known)), answers) or "no hand-over is remembered"
