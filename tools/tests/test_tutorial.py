"""The tutorial's commands that need no engine, run as they stand; `test --long host` runs all of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvdev.paths import ROOT
from kvdev.transcripts import play, read_steps

PAGE = ROOT / "docs" / "tutorial.md"


def test_commands_without_engines_print_what_the_page_shows(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "200"}
    steps = [step for step in read_steps(PAGE) if not step.is_live]
    assert len(steps) == 6
    assert play(steps, tmp_path, environment, timeout_s=60) == []


def test_every_command_of_the_page_is_a_step() -> None:
    steps = read_steps(PAGE, {8100: 9100})
    assert len(steps) == PAGE.read_text().count("\n$ ")
    assert all("8100" not in step.command for step in steps)
    assert sum(step.is_live for step in steps) > 15
