"""Tables of engines' answers, drawn by rich, and what is wrong with an engine in words."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vllm_adapter.observe.plain_text import plain_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cli.asking import Answer

__all__ = ["print_tables", "troubles"]

_PIPE_COLUMNS = 160
_COLUMNS = ("engine", "part", "pid", "thread", "leases", "reads", "peers", "quarantine", "stalls", "read so far")
_DETAILS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "oldest_requests",
        "requests",
        (
            ("request", "request_id"),
            ("role", "role"),
            ("state", "state"),
            ("age", "age_s"),
            ("peer", "peer_engine_id"),
            ("waits for", "waits_for"),
        ),
    ),
    (
        "oldest_leases",
        "leases",
        (
            ("request", "request_id"),
            ("state", "state"),
            ("left", "left_s"),
            ("last heartbeat", "last_heartbeat_s"),
            ("readers done", "readers_done"),
            ("of", "readers_needed"),
        ),
    ),
    (
        "oldest_reads",
        "reads",
        (
            ("request", "request_id"),
            ("from engine", "peer_engine_id"),
            ("stage", "stage"),
            ("age", "age_s"),
            ("given up in", "deadline_in_s"),
            ("attempt", "attempt"),
            ("failure", "code"),
        ),
    ),
    (
        "oldest_streams",
        "streamed reads",
        (
            ("request", "request_id"),
            ("from engine", "peer_engine_id"),
            ("stage", "stage"),
            ("tokens finished there", "tokens_finished"),
            ("of", "tokens"),
            ("read", "bytes"),
            ("age", "age_s"),
        ),
    ),
    (
        "peer_engines",
        "peers",
        (
            ("engine", "engine_id"),
            ("side channel", "side_channel"),
            ("phase", "phase"),
            ("ranks read", "ranks_read"),
            ("bytes a token", "bytes_per_token"),
            ("reads", "reads_in_flight"),
            ("waiting", "reads_waiting"),
            ("last answer", "silent_s"),
        ),
    ),
)
"""(key of an answer, title, (heading, key of an entry) per column)."""


def print_tables(answers: Sequence[Answer], *, with_requests: bool = False) -> None:
    """Print a row per process, then what is wrong."""
    width = None if sys.stdout.isatty() else max(_PIPE_COLUMNS, shutil.get_terminal_size().columns)
    console = Console(width=width)
    # Printed by ourselves: at a pipe that is closed, rich would end the process with 1.
    with console.capture() as drawn:
        draw_tables(console, answers, with_requests=with_requests)
    print(drawn.get(), end="")


def draw_tables(console: Console, answers: Sequence[Answer], *, with_requests: bool = False) -> None:
    """Draw the same on any console."""
    _print(console, "", _COLUMNS, [_row(answer) for answer in answers])
    for answer in answers if with_requests else ():
        _print_details(console, answer)
    for style, lines in (("bold red", troubles(answers)), ("yellow", _unshielded(answers))):
        for line in lines:
            console.print(plain_text(line), style=style, markup=False, highlight=False)


def _print_details(console: Console, answer: Answer) -> None:
    """Print the oldest requests, leases and reads of a process, and its peers."""
    for key, title, columns in _DETAILS:
        rows = [[_text(name, entry.get(name)) for _, name in columns] for entry in answer.get(key) or ()]
        if rows:
            headings = [heading for heading, _ in columns]
            _print(console, f"{title} of {_name(answer)}, oldest first", headings, rows)


def _print(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, title=Text(plain_text(title)) if title else None, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*[Text(plain_text(cell)) for cell in row])
    console.print(table)


def _row(answer: Answer) -> list[str]:
    thread: dict[str, Any] = answer.get("thread") or {}
    figures: dict[str, Any] = answer.get("figures") or {}
    return [
        str(answer.get("engine_id", answer.get("socket", ""))),
        str(answer.get("part", "?")),
        str(answer.get("pid", "?")),
        _thread(answer, str(thread.get("state", ""))),
        _leases(answer),
        _reads(answer),
        _count(answer, "peers"),
        _held(answer, "quarantined"),
        _held(answer, "stalled"),
        _moved(figures),
    ]


def _thread(answer: Answer, state: str) -> str:
    if "error" in answer:
        return "no answer"
    if answer.get("is_draining"):
        return "drains"
    return state or ("asleep" if answer.get("is_asleep") else "")


def _leases(answer: Answer) -> str:
    blocks, held = answer.get("leased_blocks"), answer.get("leased_bytes")
    if not blocks:
        return _count(answer, "leases")
    return f"{_count(answer, 'leases')} ({blocks} blocks{', ' + size_text(held) if held else ''})"


def _count(answer: Answer, name: str) -> str:
    return str(answer.get(name, ""))


def _reads(answer: Answer) -> str:
    streams = answer.get("streams")
    return f"{_count(answer, 'reads')} + {streams} streamed" if streams else _count(answer, "reads")


def _held(answer: Answer, name: str) -> str:
    count = answer.get(f"{name}_transfers")
    return "" if count is None else f"{count} ({size_text(answer.get(f'{name}_bytes', 0))})" if count else "0"


def _moved(figures: dict[str, Any]) -> str:
    done = int(figures.get("transfers_done") or 0)
    if not done:
        return ""
    speed = float(figures.get("recent_bytes_per_s") or 0.0)
    return f"{done} in {size_text(figures.get('bytes_moved', 0))}" + (
        f", {speed / 1e9:.2f} GB/s lately" if speed else ""
    )


def size_text(count: object) -> str:
    """Return bytes in the largest unit of which there is one at least. Example: 13312 is `13.0 KiB`."""
    size = float(count) if isinstance(count, int | float) else 0.0
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if name == "bytes":
        return size_text(value)
    if isinstance(value, float):
        return f"{value:.1f} s" if name.endswith("_s") else f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _name(answer: Answer) -> str:
    return f"engine {answer.get('engine_id', '?')}, {answer.get('part', '?')}"


def troubles(answers: Sequence[Answer]) -> list[str]:
    """Return what an operator should act on, a sentence per process and reason."""
    found: list[str] = []
    for answer in answers:
        thread: dict[str, Any] = answer.get("thread") or {}
        if "error" in answer:
            found.append(f"{answer.get('socket', _name(answer))}: {answer['error']}")
        elif thread.get("state") == "dead":
            found.append(
                f"{_name(answer)}: the transfer thread has died; restart this engine ({thread.get('last_error', '')})"
            )
        elif thread.get("state") == "stuck" or answer.get("is_silent"):
            found.append(
                f"{_name(answer)}: the transfer thread does not answer; no read and no lease of it makes progress"
            )
    return found


def _unshielded(answers: Sequence[Answer]) -> list[str]:
    """Return a sentence per rank that a dying consumer can end; fakes of NIXL load no UCX, and older engines say nothing."""
    found: list[str] = []
    for answer in answers:
        thread: dict[str, Any] = answer.get("thread") or {}
        state = thread.get("ucx_requests")
        if state not in {None, "zeroed", "not-loaded"}:
            found.append(
                f"{_name(answer)}: UCX's requests are not zeroed ({state}): a consumer that dies in a read over TCP may end "
                "this engine"
            )
    return found
