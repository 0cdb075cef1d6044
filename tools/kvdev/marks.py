"""Tables that programs write into pages: each stands between two marks, comments with its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["with_tables"]


def with_tables(page: str, made: Mapping[str, str]) -> str:
    """Return the page with each table between its marks; of an empty one nothing but the marks is left.

    In the lines `<!-- t -->`, `old`, `<!-- end of t -->` the table `t` replaces `old`, with a blank line before and after it.

    Raises:
        ValueError: The page lacks a mark.
    """
    for name, table in made.items():
        marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)", re.DOTALL)
        found = marks.search(page)
        if not found:
            raise ValueError(f"the page has no marks for {name!r}")
        text = f"\n{table}\n\n" if table else ""
        page = f"{page[: found.start()]}{found[1]}{text}{found[2]}{page[found.end() :]}"
    return page
