"""`vllm-adapter trace`: one hand-over's timeline, put together from what both engines remember of it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from vllm_adapter.cli.engines import ask_all
from vllm_adapter.cli.timeline import join_hand_overs, make_timeline
from vllm_adapter.cli.values import coded_errors, json_text, misfit, parse_json, read_text, seconds
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.answers import Answer
from vllm_adapter.observe.cause_log import plain_text
from vllm_adapter.observe.status_socket import TRACE_REQUEST, status_folders

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_adapter.cli.timeline import HandOver, Span, Timeline

__all__ = ["add_trace", "timeline_text"]

_MOST_UNEXPLAINED = 0.05
"""Part of the time to the first token that may stay without a name."""
_UNEXPLAINED = 1
_USAGE = 2
_NOT_FOUND = 3
_LEAST_TTFT_S = 1e-6
_BAR_COLUMNS = 28

_EPILOG = """\b
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
"""


def add_trace(app: typer.Typer) -> None:
    """Register the command."""
    app.command("trace", epilog=_EPILOG)(_trace)


def _trace(
    request: Annotated[
        str | None,
        typer.Argument(metavar="REQUEST", help="Request id of either engine, or a part of it; default: the latest."),
    ] = None,
    *,
    lists: Annotated[bool, typer.Option("--list", help="List the hand-overs that the engines remember.")] = False,
    ttft: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time to the first token that a client measured, to compare with."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The timeline as JSON.")] = False,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the answers of this machine's engines for --with.")
    ] = None,
    others: Annotated[
        list[str] | None, typer.Option("--with", metavar="FILE", help="Answers saved on another machine.")
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where the sockets are; default: where this user's engines put them."),
    ] = None,
) -> None:
    """Show one hand-over's timeline, put together from both engines."""
    folders = (Path(folder),) if folder else status_folders()
    desk = f"command {os.uname().nodename} {os.getpid()} {time.monotonic_ns()}"
    with coded_errors("trace"):
        if ttft is not None:
            seconds("--ttft", ttft, least_s=_LEAST_TTFT_S)
        saved = [answer for file in others or () for answer in _saved(file)]
    answers: list[Answer] = [{"desk": desk, **answer} for answer in ask_all(folders, request=TRACE_REQUEST)]
    if save:
        _write(save, answers)
    answers += saved
    for answer in answers:
        if "error" in answer:
            _say(f"{answer.get('socket', '')}: {answer['error']}")
    hand_overs = join_hand_overs(answers)
    if lists:
        print(json_text([_ids(each) for each in hand_overs], indent=2) if as_json else _list_text(hand_overs))
        raise typer.Exit(0 if hand_overs else _NOT_FOUND)
    wanted = [each for each in hand_overs if request is None or _is_meant(each, request)]
    if not wanted:
        _say(_not_found(request, hand_overs, answers))
        raise typer.Exit(_NOT_FOUND)
    timeline = make_timeline(wanted[-1], measured_s=ttft)
    print(json_text(asdict(timeline), indent=2) if as_json else timeline_text(timeline))
    if timeline.unexplained_part > _MOST_UNEXPLAINED:
        raise typer.Exit(_UNEXPLAINED)


def _write(file: str, value: object) -> None:
    try:
        Path(file).write_text(json_text(value), encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        _say(f"{file} cannot be written: {error}")
        raise typer.Exit(_USAGE) from None


def _saved(file: str) -> list[Answer]:
    """Return the answers that another machine's command has saved.

    Raises:
        AdapterError: `unreadable`.
    """
    found = parse_json(read_text(file), file)
    if wrong := misfit(found, list[Answer]):
        raise AdapterError(f"{file} was not written by `vllm-adapter trace --save`: {wrong}", code="unreadable")
    return cast("list[Answer]", found)


def _is_meant(hand_over: HandOver, request: str) -> bool:
    return request in hand_over.decode.request_id or request in str(hand_over.decode.facts.get("peer_request_id", ""))


def _ids(hand_over: HandOver) -> dict[str, object]:
    decode = hand_over.decode
    return {"decode": {"engine_id": decode.engine_id, "request_id": decode.request_id}, "prefill": hand_over.peer}


def _not_found(request: str | None, hand_overs: Sequence[HandOver], answers: Sequence[Answer]) -> str:
    if hand_overs:
        return f"no hand-over is meant by {request!r}; `vllm-adapter trace --list` lists all {len(hand_overs)} that are known"
    engines = sorted({str(answer["engine_id"]) for answer in answers if "engine_id" in answer})
    if not engines:
        return (
            "no live engine found. An engine answers to its own user, on its own machine and in its own container: run this "
            "command there"
        )
    return f"no decode engine among {', '.join(engines)} remembers a hand-over: each remembers its last 128 since it started"


def _say(text: str) -> None:
    print(f"vllm-adapter trace: {plain_text(text)}", file=sys.stderr)


def timeline_text(timeline: Timeline) -> str:
    """Return the spans with a bar each, the part that is unexplained, and how certain the clocks are."""
    return "\n".join(map(plain_text, _lines(timeline)))


def _lines(timeline: Timeline) -> Iterator[str]:
    decode, prefill, size = timeline.decode, timeline.prefill, timeline.bytes
    yield f"prefill  request {prefill['request_id']} of engine {prefill['engine_id']}"
    yield f"decode   request {decode['request_id']} of engine {decode['engine_id']}, {timeline.tokens} tokens, {size} bytes"
    if timeline.is_streamed:
        share = f" ({timeline.early_bytes / size:.0%})" if size else ""
        early = f"{timeline.early_bytes} bytes{share}"
        yield f"streamed: {early} had arrived when the decode engine saw the end of the prompt's last step"
    yield from ("", f"  {'begins':>11}  {'takes':>11}   {'':{_BAR_COLUMNS}}  where and what")
    whole_s = sum(span.duration_s for span in timeline.spans)
    yield from (_row(span, whole_s) for span in timeline.spans)
    if timeline.side_spans:
        yield from ("", "  beside it")
        yield from (_row(span, whole_s) for span in timeline.side_spans)
    yield ""
    part, whose = (
        timeline.unexplained_part,
        "as the engines see it" if timeline.measured_s is None else "as the client measured it",
    )
    what = "is unexplained" if timeline.named_s <= timeline.total_s else "more than was measured"
    verdict = "" if part <= _MOST_UNEXPLAINED else f" (more than {_MOST_UNEXPLAINED:.0%})"
    named = f"named spans cover {_ms(timeline.named_s)}, {part:.1%} {what}{verdict}"
    yield f"time to the first token, {whose}: {_ms(timeline.total_s)}; {named}"
    if timeline.measured_s is None:
        yield "not seen by engines: the client's way to prefill's frontend, and the first token's way back; --ttft counts them"
    known = [(value, name) for name, value in timeline.clock_uncertainty_s.items() if value]
    if known:
        worst_s, worst = max(known)
        yield f"clocks aligned by messages: within {_ms(worst_s)} of {decode['engine_id']}/scheduler ({worst})"
    if unknown := [name for name, value in timeline.clock_uncertainty_s.items() if value is None]:
        yield f"no messages went both ways to {', '.join(unknown)}: its moments are left out"
    if not prefill["is_known"]:
        yield "the prefill engine was not asked, or has forgotten: run this on its machine with --save, then here --with"
    for code in timeline.codes:
        yield f"the read failed: {code}; its prompt was computed here, or refused"


def _row(span: Span, whole_s: float) -> str:
    times = f"{_ms(span.begin_s):>11}  {_ms(span.duration_s):>11}"
    return f"  {times}   {_bar(span, whole_s):{_BAR_COLUMNS}}  {span.where}: {span.name}"


def _bar(span: Span, whole_s: float) -> str:
    """Return where a span lies in the whole. Example: a quarter in the middle of 8 columns is `   ##`."""
    if whole_s <= 0:
        return ""
    begin, end = (min(1.0, max(0.0, at_s / whole_s)) for at_s in (span.begin_s, span.begin_s + span.duration_s))
    first = min(_BAR_COLUMNS - 1, int(_BAR_COLUMNS * begin))
    last = max(first + 1, round(_BAR_COLUMNS * end))
    return " " * first + "#" * (last - first)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _list_text(hand_overs: Sequence[HandOver]) -> str:
    lines = [
        f"{each.decode.engine_id} {each.decode.request_id} from {each.decode.facts.get('peer_engine_id')} "
        f"{each.decode.facts.get('peer_request_id')}{'' if each.prefill else ' (not asked, or forgotten)'}"
        for each in hand_overs
    ]
    return "\n".join(map(plain_text, lines)) or "no hand-over is remembered"
