"""Ways in which a command of a page is shown to work: run, seen by a named test, or checked only. `ways.toml` has the table."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdev.pages.running import Run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdev.pages.commands import PageCommand

__all__ = ["Checked", "Named", "Played", "Row", "Seen", "Way", "read_ways", "row_of"]

_TABLE = Path(__file__).with_name("ways.toml")


@dataclass(frozen=True, slots=True)
class Seen:
    """A test runs this command: its program, verb and options are words of that test, which stands as `path::function`."""

    test: str


@dataclass(frozen=True, slots=True)
class Played:
    """A test reads the commands of this page, or of all (`*`), and runs them as they stand."""

    test: str
    page: str


@dataclass(frozen=True, slots=True)
class Checked:
    """It is not run: a test checks its words, for a reason that is printed."""

    test: str
    why: str


@dataclass(frozen=True, slots=True)
class Named:
    """Another program's command that a sentence names without its arguments: there is nothing to type."""


Way = Run | Seen | Played | Checked | Named


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        pattern: The whole command.
        way: How it is shown to work.
        only: The page whose blocks the row is about; empty for all pages, sentences included.
    """

    pattern: str
    way: Way
    only: str = ""

    def is_about(self, command: PageCommand) -> bool:
        """Return whether the row is about a command."""
        is_there = not self.only or (command.page == self.only and not command.is_inline)
        return is_there and re.fullmatch(self.pattern, command.text, re.DOTALL) is not None


@cache
def read_ways() -> tuple[Row, ...]:
    """Return the rows, in the order in which they are tried."""
    rows = tomllib.loads(_TABLE.read_text())["way"]
    return tuple(Row(row["command"], _way(row), row.get("only", "")) for row in rows)


def row_of(command: PageCommand) -> Row | None:
    """Return the first row that is about a command; None if there is none."""
    return next((row for row in read_ways() if row.is_about(command)), None)


def _way(row: Mapping[str, Any]) -> Way:
    if "seen" in row:
        return Seen(row["seen"])
    if "played" in row:
        return Played(row["played"], row["page"])
    if "checked" in row:
        return Checked(row["checked"], row["why"])
    if "named" in row:
        return Named()
    given = tuple(dict(row.get("given", {})).items())
    return Run(given, row.get("code", 0), row.get("prints", ""), row.get("is_endless", False))
