"""`vllm-adapter status`: what live engines hold, asked of each of their processes and merged."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_adapter.cli.asking import ask_all, of_engine
from vllm_adapter.cli.json_values import json_text
from vllm_adapter.cli.options import refuse, seconds
from vllm_adapter.cli.status_table import print_tables, troubles
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.status_folder import status_folders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cli.asking import Answer

__all__ = ["add_status"]

_WELL = 0
_TROUBLE = 1
_NOT_FOUND = 3
_LEAST_WATCH_S = 0.5
"""A process answers ten times a second at most; this leaves room for others who ask."""
_CLEARED = "\x1b[2J\x1b[H"
"""Clears a terminal and puts the cursor into its first line."""

_EPILOG = """\b
examples:
  vllm-adapter status
  vllm-adapter status decode-0 --requests
  vllm-adapter status --watch 2

\b
exit codes:
  0  every process answered, and no transfer thread is dead or stuck
  1  a process did not answer, or its transfer thread is dead or stuck
  2  wrong usage
  3  no such engine runs on this machine for this user
"""


def add_status(app: typer.Typer) -> None:
    """Register the command."""
    app.command("status", epilog=_EPILOG)(_status)


def _status(
    engine: Annotated[
        str | None,
        typer.Argument(metavar="ENGINE", help="Engine id, the beginning of one, or a process id; default: all."),
    ] = None,
    *,
    requests: Annotated[
        bool, typer.Option("--requests", help="Also the oldest requests, leases, reads and the peers.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The processes' answers as JSON; with --watch a line each time.")
    ] = False,
    watch: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Ask and show again after so many, until Ctrl-C.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Wait for all processes.")] = 3.0,
    folder: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where the sockets are; default: where this user's engines put them."),
    ] = None,
) -> int:
    """Show what live engines of this machine hold: leases, reads, peers, stalls, health."""
    folders = (Path(folder),) if folder else status_folders()
    code = _WELL
    try:
        seconds("--timeout", timeout)
        if watch is not None:
            seconds("--watch", watch, least_s=_LEAST_WATCH_S)
        while True:
            answers = ask_all(folders, timeout_s=timeout)
            if watch is not None and not as_json and sys.stdout.isatty():
                print(_CLEARED, end="")
            code = _show(answers, engine, folders, requests=requests, as_json=as_json, indent=None if watch else 2)
            if watch is None or code == _NOT_FOUND:
                return code
            sys.stdout.flush()
            time.sleep(watch)
    except AdapterError as error:
        return refuse("status", error)
    except KeyboardInterrupt:
        return code


def _show(
    answers: Sequence[Answer],
    engine: str | None,
    folders: Sequence[Path],
    *,
    requests: bool,
    as_json: bool,
    indent: int | None,
) -> int:
    """Print what was answered; return the exit code."""
    found = of_engine(answers, engine) if engine else answers
    if as_json:
        print(json_text({"engines": _by_engine(found), "troubles": troubles(found)}, indent=indent))
    elif found:
        print_tables(found, with_requests=requests)
    if not found:
        print(f"vllm-adapter status: {_not_found(engine, answers, folders)}", file=sys.stderr)
        return _NOT_FOUND
    return _TROUBLE if troubles(found) else _WELL


def _by_engine(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    engines: dict[str, list[Answer]] = {}
    for answer in answers:
        engines.setdefault(str(answer.get("engine_id", "")), []).append(answer)
    return engines


def _not_found(engine: str | None, answers: Sequence[Answer], folders: Sequence[Path]) -> str:
    names = sorted({str(answer["engine_id"]) for answer in answers if "engine_id" in answer})
    if engine and names:
        return f"no engine, or more than one, is meant by {engine!r}; there are {', '.join(names)}"
    looked = " and ".join(map(str, folders))
    return (
        f"no live engine found in {looked}. An engine answers to its own user, on its own machine and in its own container: "
        "run this command there. Its log says so if it could open no socket"
    )
