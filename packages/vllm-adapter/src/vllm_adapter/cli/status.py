"""`vllm-adapter status`: the state of live engines, asked of each of their processes and merged; and `vllm-adapter revoke`.

`revoke` ends all unread leases of an engine, so that vLLM's `/pause` does not wait for them.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from vllm_adapter.cache.names import ROLES
from vllm_adapter.cli.engines import NO_ENGINE, ask, ask_all, engine_names, engine_text, http_ports, of_engine
from vllm_adapter.cli.values import Folder, Json, Timeout, json_text, say, within
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.answers import status_folders
from vllm_adapter.observe.recorder import plain_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.observe.answers import Answer

__all__ = ["print_tables", "revoke", "status", "troubles"]

_TROUBLE = 1
_NOT_FOUND = 3
_WATCH = within(0.5, 3600, "s")
"""A process answers ten times a second at most; the least leaves room for others who ask."""
_CLEARED = "\x1b[2J\x1b[H"
"""Clears a terminal and puts the cursor into its first line."""

_PIPE_COLUMNS = 160
_DETAILS = ("oldest_requests", "oldest_leases", "oldest_reads", "oldest_streams", "peer_engines")
"""Keys of an answer whose entries are tables of their own."""


def status(
    engine: Annotated[
        str | None,
        typer.Argument(metavar="ENGINE", help="Name, id or HOST:PORT of an engine, or a process id; default: all."),
    ] = None,
    *,
    requests: Annotated[
        bool, typer.Option("--requests", help="Also the oldest requests, leases, reads, peers.")
    ] = False,
    as_json: Json = False,
    watch: Annotated[
        float | None, typer.Option(metavar="SECONDS", callback=_WATCH, help="Repeat until Ctrl-C.")
    ] = None,
    timeout: Timeout = 3.0,
    folder: Folder = None,
) -> None:
    """Show what live engines of this machine hold: leases, reads, peers, stalls, health.

    \b
    examples:
      vllm-adapter status
      vllm-adapter status decode-0 --requests
      vllm-adapter status --watch 2

    \b
    exit codes:
      0  every process answered, and no transfer thread is dead or stuck
      1  a process did not answer, or its transfer thread is dead or stuck
      2  wrong usage
      3  no such engine, or more than one, runs on this machine for this user
    """  # noqa: D301 - a backslash keeps the lines of the help
    code = 0
    with suppress(KeyboardInterrupt):
        while True:
            answers = ask_all(folder, timeout_s=timeout)
            found = _engine_of("status", answers, engine) if engine else answers
            for scheduler in (answer for answer in found if answer.get("part") == "scheduler"):
                scheduler["http_ports"] = http_ports(scheduler)
            wrong = troubles(found)
            if as_json:
                engines = {name: list(each) for name, each in groupby(found, lambda one: str(one.get("engine_id", "")))}
                print(json_text({"engines": engines, "troubles": wrong}, indent=None if watch else 2))
            elif found:
                print(_CLEARED if watch and sys.stdout.isatty() else "", end="")
                print_tables(found, with_requests=requests)
            if not found:
                say("status", _not_found(engine, answers, (folder,) if folder else status_folders()))
                raise typer.Exit(_NOT_FOUND)
            code = _TROUBLE if wrong else 0
            if watch is None:
                break
            sys.stdout.flush()
            time.sleep(watch)
    raise typer.Exit(code)


def _engine_of(command: str, answers: Sequence[Answer], word: str) -> list[Answer]:
    """Return the answers of the engine that is meant; end the command if a word may mean more than one."""
    try:
        return of_engine(answers, word)
    except AdapterError as error:
        say(command, str(error))
        raise typer.Exit(_NOT_FOUND) from None


def _not_found(engine: str | None, answers: Sequence[Answer], folders: Sequence[Path]) -> str:
    if engine and (names := engine_names(answers)):
        return f"no engine is meant by {engine!r}; there are {', '.join(names)}"
    return f"no live engine found in {' and '.join(map(str, folders))}. {NO_ENGINE}"


def print_tables(answers: Sequence[Answer], *, with_requests: bool = False) -> None:
    """Print a row per engine and one per process, then what is wrong."""
    width = None if sys.stdout.isatty() else max(_PIPE_COLUMNS, shutil.get_terminal_size().columns)
    console = Console(width=width)
    # Printed by ourselves: at a pipe that is closed, rich would end the process with 1.
    with console.capture() as drawn:
        engines = {engine_text(answer): answer for answer in reversed(answers) if answer.get("name")}
        _draw(console, "", [_engine_row(answer) for answer in reversed(engines.values())])
        _draw(console, "", [_row(answer) for answer in answers])
        for answer in answers if with_requests else ():
            for key in _DETAILS:
                entries = cast("dict[str, list[dict[str, object]]]", answer).get(key) or ()
                names = dict.fromkeys(name for entry in entries for name in entry)
                rows = [{_heading(name): _text(name, entry.get(name)) for name in names} for entry in entries]
                title = key.removeprefix("oldest_").replace("_", " ")
                _draw(console, f"{title} of {_name(answer)}, oldest first", rows)
        for line in troubles(answers):
            console.print(plain_text(line), style="bold red", markup=False, highlight=False)
        for line in filter(None, map(_risk, answers)):
            console.print(plain_text(line), style="yellow", markup=False, highlight=False)
    print(drawn.get(), end="")


def _heading(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_id").replace("_", " ")


def _draw(console: Console, title: str, rows: Sequence[dict[str, str]]) -> None:
    """Draw rows, texts by heading; nothing without a row."""
    if not rows:
        return
    table = Table(box=box.SIMPLE, title=Text(plain_text(title)) if title else None, title_justify="left")
    for heading in rows[0]:
        table.add_column(Text(plain_text(heading)), overflow="fold")
    for row in rows:
        table.add_row(*[Text(plain_text(cell)) for cell in row.values()])
    console.print(table)


def _engine_row(answer: Answer) -> dict[str, str]:
    role, ports = ROLES.get(answer.get("kv_role") or "", ""), ", ".join(map(str, answer.get("http_ports") or ()))
    name, side_channel, model = (str(answer.get(part)) for part in ("name", "side_channel", "model"))
    return {"engine": name, "role": role, "side channel": side_channel, "HTTP": ports, "model": model}


def _row(answer: Answer) -> dict[str, str]:
    state = (answer.get("thread") or {}).get("state") or ("asleep" if answer.get("is_asleep") else "")
    blocks, held, streams = answer.get("leased_blocks"), answer.get("leased_bytes"), answer.get("streams")
    leased = f" ({blocks} blocks{', ' + size_text(held) if held else ''})" if blocks else ""
    figures = answer.get("figures") or {}
    done, speed = int(figures.get("transfers_done") or 0), float(figures.get("recent_bytes_per_s") or 0.0)
    lately = f", {size_text(speed)}/s lately" if speed else ""
    return {
        "engine": str(answer.get("name") or answer.get("engine_id", answer.get("socket", ""))),
        "part": str(answer.get("part", "?")),
        "pid": str(answer.get("pid", "?")),
        "thread": "no answer" if "error" in answer else "drains" if answer.get("is_draining") else state,
        "leases": f"{answer.get('leases', '')}{leased}",
        "reads": f"{answer.get('reads', '')}{f' + {streams} streamed' if streams else ''}",
        "peers": str(answer.get("peers", "")),
        "quarantine": _held(answer.get("quarantined_transfers"), answer.get("quarantined_bytes")),
        "stalls": _held(answer.get("stalled_transfers"), answer.get("stalled_bytes")),
        "read so far": f"{done} in {size_text(figures.get('bytes_moved'))}{lately}" if done else "",
    }


def _held(count: float | None, size: float | None) -> str:
    return "" if count is None else f"{count} ({size_text(size)})" if count else "0"


def size_text(count: object) -> str:
    """Return bytes in the largest unit of which there is one at least. Example: 13312 is `13.3 kB`."""
    return decimal(int(max(0, min(count, 1e18))) if isinstance(count, int | float) else 0)


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if name == "bytes":
        return size_text(value)
    if isinstance(value, float):
        return f"{value:.1f} s" if name.endswith("_s") else f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _name(answer: Answer) -> str:
    return f"engine {answer.get('name') or answer.get('engine_id', '?')}, {answer.get('part', '?')}"


def troubles(answers: Sequence[Answer]) -> list[str]:
    """Return what an operator should act on, a sentence per process."""
    return [trouble for trouble in map(_trouble, answers) if trouble]


def _trouble(answer: Answer) -> str:
    thread = answer.get("thread") or {}
    if "error" in answer:
        return f"{answer.get('socket', _name(answer))}: {answer['error']}"
    if thread.get("state") == "dead":
        return f"{_name(answer)}: the transfer thread has died; restart this engine ({thread.get('last_error', '')})"
    if thread.get("state") == "stuck" or answer.get("is_silent"):
        return f"{_name(answer)}: the transfer thread does not answer; no read and no lease of it makes progress"
    return ""


def _risk(answer: Answer) -> str:
    """Return a sentence for a rank that a dying consumer can end; fakes of NIXL load no UCX, and older engines report nothing."""
    state = (answer.get("thread") or {}).get("ucx_requests")
    if state in {None, "zeroed", "not-loaded"}:
        return ""
    reason = f"UCX's requests are not zeroed ({state}): a consumer that dies in a read over TCP may end this engine"
    return f"{_name(answer)}: {reason}"


# ----------------------------------------------------------------------------------------------------------------- revoke


def revoke(
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="Name, id or HOST:PORT of an engine, or a process id of it.")
    ],
    *,
    as_json: Json = False,
    timeout: Timeout = 3.0,
    folder: Folder = None,
) -> None:
    """Revoke all unread leases of a live engine: their tickets become worthless, and their blocks are free.

    vLLM counts a finished request whose blocks are kept for a reader as work, so /pause of a prefill engine waits for its
    longest unread lease. Run this while /pause waits, or before it. Readers of these tickets end as kv_load_failure_policy says.

    \b
    examples:
      vllm-adapter revoke prefill-0
      curl -X POST 'http://localhost:8000/pause?mode=keep' & vllm-adapter revoke prefill-0

    \b
    exit codes:
      0  the engine revokes its leases, or had none
      1  its scheduler did not answer
      2  wrong usage
      3  no such engine, or more than one, runs on this machine for this user
    """  # noqa: D301 - a backslash keeps the lines of the help
    # An empty name is a script's mistake; as the beginning of every name it would stand for the only engine here.
    found = _engine_of("revoke", ask_all(folder, timeout_s=timeout), engine) if engine.strip() else []
    schedulers = [answer for answer in found if answer.get("part") == "scheduler"]
    if not schedulers:
        hint = "vllm-adapter status lists the engines of this machine"
        say("revoke", f"no scheduler of an engine {engine!r} found; {hint}")
        raise typer.Exit(_NOT_FOUND)
    (answer,) = ask([Path(schedulers[0].get("socket") or "")], "revoke", timeout_s=timeout) or [
        {"error": "it has ended"}
    ]
    if as_json:
        print(json_text(answer, indent=2))
    if "error" in answer:
        say("revoke", f"engine {engine!r} revoked nothing: {answer['error']}")
        raise typer.Exit(_TROUBLE)
    if not as_json:
        kept = f"{answer.get('leased_blocks')} blocks ({answer.get('leased_bytes')} bytes on each rank)"
        name = schedulers[0].get("name") or answer.get("engine_id")
        print(plain_text(f"engine {name}: {answer.get('leases')} leases revoked, {kept} come back"))
