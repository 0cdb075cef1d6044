"""A look at a fleet, as rich draws it: a table of engines, the oldest requests that wait, and what to act on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_adapter.cli.status_table import size_text
from vllm_adapter.observe.plain_text import plain_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from vllm_adapter.cli.fleet import EngineRow, Fleet

__all__ = ["fleet_view"]

_ENGINES = (
    "engine",
    "ranks",
    "state",
    "leases",
    "reads",
    "quarantine",
    "stalls",
    "peers",
    "reads/s",
    "GB/s",
    "read so far",
)
_WAITING = ("engine", "waits", "request", "state", "for")
_NAME_COLUMNS = 24


def fleet_view(fleet: Fleet, *, at: str | None = None, keys: str = "") -> RenderableType:
    """Return what is drawn.

    Args:
        fleet: The look.
        at: Time of day to show; None for now.
        keys: Help on the keys of a live view.
    """
    moment = time.strftime("%H:%M:%S") if at is None else at
    speeds = [row.bytes_per_s for row in fleet.rows if row.bytes_per_s is not None]
    total = f", {sum(speeds) / 1e9:.3f} GB/s" if speeds else ""
    reads = sum(row.reads + row.streams for row in fleet.rows)
    leases = sum(row.leases for row in fleet.rows)
    head = f"{moment}  {len(fleet.rows)} engines, {leases} leases, {reads} reads{total}   {keys}".rstrip()
    parts: list[RenderableType] = [Text(head, style="bold"), _table(_ENGINES, map(_row, fleet.rows))]
    if fleet.waiting:
        rows = [
            (_name(each.engine_id), f"{each.age_s:.1f} s", _name(each.request_id), each.state, each.waits_for)
            for each in fleet.waiting
        ]
        parts.append(_table(_WAITING, rows))
    parts += [Text(plain_text(line), style="bold red") for line in fleet.troubles]
    return Group(*parts)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*[Text(plain_text(cell)) for cell in row])
    return table


def _row(row: EngineRow) -> list[str]:
    return [
        _name(row.engine_id),
        str(row.ranks),
        row.state,
        f"{row.leases} ({size_text(row.leased_bytes)})" if row.leased_bytes else str(row.leases),
        _reads(row),
        _held(row.quarantined_transfers, row.quarantined_bytes),
        _held(row.stalled_transfers, row.stalled_bytes),
        str(row.peers),
        "" if row.transfers_per_s is None else f"{row.transfers_per_s:.1f}",
        "" if row.bytes_per_s is None else f"{row.bytes_per_s / 1e9:.3f}",
        f"{row.transfers_done} in {size_text(row.bytes_moved)}" if row.transfers_done else "",
    ]


def _reads(row: EngineRow) -> str:
    """Return the reads in progress. Example: `3 + 2 streamed (1 wait)`."""
    text = f"{row.reads} + {row.streams} streamed" if row.streams else str(row.reads)
    return f"{text} ({row.reads_waiting_for_a_peer} wait)" if row.reads_waiting_for_a_peer else text


def _held(count: int, held_bytes: int) -> str:
    return f"{count} ({size_text(held_bytes)})" if count else "0"


def _name(name: str) -> str:
    """Return a name that leaves room for the rest. Example: an id of 36 characters is cut in its middle to 24."""
    if len(name) <= _NAME_COLUMNS:
        return name
    half = (_NAME_COLUMNS - 2) // 2
    return f"{name[:half]}..{name[-half:]}"
