"""Draw the terminal pictures of `docs/operate`: `python tools/kvdev/site/terminals.py` writes them, a test compares them.

They are what the commands draw of answers that were recorded from live engines under load. To record anew:
`KVDEV_RECORD=docs/operate/recorded python3 tools/dev.py test host -k test_top_shows_engines_under_load`.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.terminal_theme import MONOKAI

from vllm_adapter.cli.fleet import look
from vllm_adapter.cli.fleet_table import fleet_view
from vllm_adapter.cli.status_table import draw_tables

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FOLDER", "PICTURES"]

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "operate"
_COLUMNS = 165
# Rich's own frame loads a font from elsewhere, which the site does not do.
_FRAME = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="TITLE">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: {char_height}px; white-space: pre }}
.{unique_id}-title {{ font-size: 18px; font-family: sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def _recorded(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / "recorded" / f"{name}.json").read_text())
    return found


def _picture(command: str, draw: Callable[[Console], None]) -> str:
    console = Console(width=_COLUMNS, record=True, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    draw(console)
    frame = _FRAME.replace("TITLE", command)
    name = command.replace(" ", "-")
    picture = console.export_svg(title=command, theme=MONOKAI, code_format=frame, unique_id=name)
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def _status() -> str:
    return _picture("vllm-adapter status", lambda console: draw_tables(console, _recorded("now")))


def _top() -> str:
    fleet = look(_recorded("now"), _recorded("before"))
    return _picture("vllm-adapter top", lambda console: console.print(fleet_view(fleet, at="12:00:00", keys="q ends")))


PICTURES: dict[str, Callable[[], str]] = {"status.svg": _status, "top.svg": _top}
"""File -> function that draws it."""


if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (FOLDER / file).write_text(draw())
