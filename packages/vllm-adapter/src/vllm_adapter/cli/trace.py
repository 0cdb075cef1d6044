"""`vllm-adapter trace`: one hand-over's timeline, put together from what both engines remember of it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, final

import typer

from vllm_adapter.cli.answer_shape import AnswerShape, misfit
from vllm_adapter.cli.asking import ask_all
from vllm_adapter.cli.chrome_trace import trace_events
from vllm_adapter.cli.joining import align, join_hand_overs
from vllm_adapter.cli.json_values import json_text, parse_json, read_text
from vllm_adapter.cli.options import refuse, seconds
from vllm_adapter.cli.timeline import MOST_UNEXPLAINED, make_timeline
from vllm_adapter.cli.trace_text import list_text, timeline_text
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.plain_text import plain_text
from vllm_adapter.observe.status_folder import status_folders
from vllm_adapter.observe.status_socket import TRACE_REQUEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cli.asking import Answer
    from vllm_adapter.cli.joining import HandOver

__all__ = ["TraceOptions", "add_trace", "run_trace"]

_WELL = 0
_UNEXPLAINED = 1
_WRONG = 2
_NOT_FOUND = 3
_LEAST_TTFT_S = 1e-6

_EPILOG = """\b
examples:
  vllm-adapter trace                      the latest hand-over
  vllm-adapter trace --list               the hand-overs that can be asked for
  vllm-adapter trace cmpl-4f --chrome hand-over.json

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
    chrome: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write trace events, for Perfetto or chrome://tracing.")
    ] = None,
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
) -> int:
    """Show one hand-over's timeline, put together from both engines."""
    options = TraceOptions(request, lists, ttft, as_json, chrome, save, tuple(others or ()))
    return run_trace(options, folder=Path(folder) if folder else None)


@final
@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Choices of a command.

    Attributes:
        request: Part of a request id of either engine; None for the latest hand-over.
        lists: Whether to list hand-overs instead of showing one.
        measured_s: Time to the first token that a client measured.
        as_json: Whether to print JSON.
        chrome: File for trace events.
        save: File for the answers of this machine's engines.
        others: Files with the answers of other machines' engines.
    """

    request: str | None = None
    lists: bool = False
    measured_s: float | None = None
    as_json: bool = False
    chrome: str | None = None
    save: str | None = None
    others: tuple[str, ...] = ()


def run_trace(options: TraceOptions, *, folder: Path | None = None) -> int:
    """Ask, put together, print, and return the exit code.

    Args:
        options: The choices.
        folder: Where the sockets are; None for where this user's engines put them.
    """
    try:
        if options.measured_s is not None:
            seconds("--ttft", options.measured_s, least_s=_LEAST_TTFT_S)
        saved = [answer for file in options.others for answer in _saved(file)]
    except AdapterError as error:
        return refuse("trace", error)
    folders = (folder,) if folder else status_folders()
    desk = f"command {os.uname().nodename} {os.getpid()} {time.monotonic_ns()}"
    answers = [{"desk": desk, **answer} for answer in ask_all(folders, request=TRACE_REQUEST)]
    if options.save and (wrong := _write(options.save, answers)):
        return wrong
    answers += saved
    _tell_silent(answers)
    hand_overs = join_hand_overs(answers)
    if options.lists:
        print(json_text(_brief(hand_overs), indent=2) if options.as_json else list_text(hand_overs))
        return _WELL if hand_overs else _NOT_FOUND
    wanted = [each for each in hand_overs if _is_meant(each, options.request)]
    if not wanted:
        return _say(_not_found(options.request, hand_overs, answers), _NOT_FOUND)
    return _show(wanted[-1], hand_overs, answers, options)


def _show(hand_over: HandOver, hand_overs: Sequence[HandOver], answers: Sequence[Answer], options: TraceOptions) -> int:
    clocks = align(hand_over, hand_overs, answers)
    timeline = make_timeline(hand_over, clocks, measured_s=options.measured_s)
    if options.chrome and (wrong := _write(options.chrome, trace_events(timeline))):
        return wrong
    print(json_text(timeline.as_values(), indent=2) if options.as_json else timeline_text(timeline, clocks))
    return _WELL if timeline.unexplained_part <= MOST_UNEXPLAINED else _UNEXPLAINED


def _write(file: str, value: object) -> int:
    """Write JSON; return 0, or the exit code after saying what is wrong with the file."""
    try:
        Path(file).write_text(json_text(value), encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return _say(f"{file} cannot be written: {error}", _WRONG)
    return _WELL


def _saved(file: str) -> list[Answer]:
    """Return the answers that another machine's command has saved.

    Raises:
        AdapterError: `unreadable`.
    """
    found = parse_json(read_text(file), file)
    if wrong := misfit(found, list[AnswerShape]):
        raise AdapterError(f"{file} was not written by `vllm-adapter trace --save`: {wrong}", code="unreadable")
    return cast("list[Answer]", found)


def _is_meant(hand_over: HandOver, request: str | None) -> bool:
    names = (hand_over.decode.request_id, str(hand_over.decode.facts.get("peer_request_id", "")))
    return request is None or any(request in name for name in names)


def _brief(hand_overs: Sequence[HandOver]) -> list[dict[str, object]]:
    return [
        {
            "decode": {"engine_id": each.decode.engine_id, "request_id": each.decode.request_id},
            "prefill": {
                "engine_id": each.decode.facts.get("peer_engine_id"),
                "request_id": each.decode.facts.get("peer_request_id"),
            },
        }
        for each in hand_overs
    ]


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


def _tell_silent(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if "error" in answer:
            told = plain_text(f"{answer.get('socket', '')}: {answer['error']}")
            print(f"vllm-adapter trace: {told}", file=sys.stderr)


def _say(text: str, code: int) -> int:
    print(f"vllm-adapter trace: {plain_text(text)}", file=sys.stderr)
    return code
