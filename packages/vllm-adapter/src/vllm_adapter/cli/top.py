"""`vllm-adapter top`: a fleet as it lives, a row per engine, asked over the same sockets as `status`."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer

from vllm_adapter.cli.asking import ask_all, of_engine
from vllm_adapter.cli.fleet import look
from vllm_adapter.cli.json_values import json_text
from vllm_adapter.cli.keys import single_keys, wants_end
from vllm_adapter.cli.options import refuse, seconds
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.status_folder import status_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_adapter.cli.asking import Answer
    from vllm_adapter.cli.fleet import Fleet

__all__ = ["LEAST_INTERVAL_S", "TopOptions", "add_top", "run_top"]

_WELL = 0
_TROUBLE = 1
_NOT_FOUND = 3
LEAST_INTERVAL_S = 0.5
"""A process answers ten times a second at most; this leaves room for others who ask."""
_PIPE_COLUMNS = 160

_EPILOG = """q or Ctrl-C ends it.

\b
examples:
  vllm-adapter top
  vllm-adapter top --once --json

\b
exit codes:
  0  ended, and at the last look every process answered and no transfer thread was dead or stuck
  1  a process did not answer, or its transfer thread is dead or stuck
  2  wrong usage
  3  no such engine runs on this machine for this user
"""


@final
@dataclass(frozen=True, slots=True)
class TopOptions:
    """Choices of a command.

    Attributes:
        engines: Ids, beginnings of ids or process ids; empty for all.
        once: Whether to look once (twice, an interval apart, if speeds are wanted) and end.
        as_json: Whether to print a line of JSON per look.
        interval_s: Time between two looks.
        timeout_s: Longest wait for all processes.
        folder: Where the sockets are; None for where this user's engines put them.
    """

    engines: tuple[str, ...] = ()
    once: bool = False
    as_json: bool = False
    interval_s: float = 2.0
    timeout_s: float = 3.0
    folder: Path | None = None


def add_top(app: typer.Typer) -> None:
    """Register the command."""
    app.command("top", epilog=_EPILOG)(_top)


def _top(
    engines: Annotated[
        list[str] | None,
        typer.Argument(metavar="ENGINE", help="Engine ids, beginnings of ids, or process ids; default: all."),
    ] = None,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Look, wait for one interval, look again, print, and end.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON per look.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two looks.")] = 2.0,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Wait for all processes.")] = 3.0,
    folder: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where the sockets are; default: where this user's engines put them."),
    ] = None,
) -> int:
    """Show a fleet as it lives: a row per engine, again and again."""
    where = Path(folder) if folder else None
    return run_top(TopOptions(tuple(engines or ()), once, as_json, interval, timeout, where))


def run_top(options: TopOptions) -> int:
    """Look again and again until somebody ends it; return the exit code."""
    try:
        seconds("--interval", options.interval_s, least_s=LEAST_INTERVAL_S)
        seconds("--timeout", options.timeout_s)
    except AdapterError as error:
        return refuse("top", error)
    first = _ask(options)
    if not first:
        where = " and ".join(map(str, _folders(options)))
        print(f"vllm-adapter top: no such engine lives in {where}; `vllm-adapter status` lists all", file=sys.stderr)
        return _NOT_FOUND
    if options.as_json:
        return _print_each(options, first, _print_json)
    return _draw(options, first)


def _folders(options: TopOptions) -> tuple[Path, ...]:
    return (options.folder,) if options.folder else status_folders()


def _ask(options: TopOptions) -> list[Answer]:
    answers = ask_all(_folders(options), timeout_s=options.timeout_s)
    if not options.engines:
        return answers
    found = [answer for engine in options.engines for answer in of_engine(answers, engine)]
    return list({id(answer): answer for answer in found}.values())


def _looks(options: TopOptions, first: list[Answer]) -> Iterator[Fleet]:
    """Yield a look after each interval; with `once` a single one, with the speeds since the first."""
    before = first
    if not options.once:
        yield look(first)
    while not wants_end(options.interval_s):
        answers = _ask(options)
        yield look(answers, before)
        if options.once:
            return
        before = answers


def _code(fleet: Fleet | None) -> int:
    return _TROUBLE if fleet is not None and fleet.troubles else _WELL


def _print_each(options: TopOptions, first: list[Answer], show: Callable[[Fleet], None]) -> int:
    last: Fleet | None = None
    with suppress(KeyboardInterrupt):
        for last in _looks(options, first):
            show(last)
    return _code(last)


def _print_json(fleet: Fleet) -> None:
    print(json_text(fleet.as_values()), flush=True)


def _draw(options: TopOptions, first: list[Answer]) -> int:
    from rich.console import Console

    from vllm_adapter.cli.fleet_table import fleet_view

    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else max(_PIPE_COLUMNS, shutil.get_terminal_size().columns))

    def show(fleet: Fleet) -> None:
        # Printed by ourselves: at a pipe that is closed, rich would end the process with 1.
        with console.capture() as drawn:
            console.print(fleet_view(fleet))
        print(drawn.get(), end="", flush=True)

    if options.once or not is_terminal:
        return _print_each(options, first, show)
    return _draw_live(options, first, console)


def _draw_live(options: TopOptions, first: list[Answer], console: Any) -> int:  # noqa: ANN401  (rich's console)
    from rich.live import Live

    from vllm_adapter.cli.fleet_table import fleet_view

    last: Fleet | None = None
    with single_keys(), Live(console=console, screen=True, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        for last in _looks(options, first):
            live.update(fleet_view(last, keys="q ends"), refresh=True)
    return _code(last)
