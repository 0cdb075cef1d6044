"""The tutorial's commands that need no engine, run as they stand; `test --long host` runs all of them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from kvdev.paths import ROOT
from kvdev.transcripts import Step, play, read_steps

PAGE = ROOT / "docs" / "tutorial.md"
_CALL = (
    "import sys; from importlib.metadata import entry_points; sys.argv[0] = {0!r}; "
    "(one,) = entry_points(group='console_scripts', name={0!r}); sys.exit(one.load()())"
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Commands of this environment on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("vllm-adapter",):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(_CALL.format(name))} "$@"\n')
        program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "COLUMNS": "200"}


def test_commands_without_engines_print_what_the_page_shows(tmp_path: Path, environment: dict[str, str]) -> None:
    steps = [step for step in read_steps(PAGE) if not step.is_live]
    assert len(steps) == 6
    assert play(steps, tmp_path, environment, timeout_s=60) == []


def test_another_output_is_told(tmp_path: Path) -> None:
    steps = [Step("echo one; echo two", "one\n...", False), Step("echo 3 apples", "... pears", False)]
    steps += [Step("false || echo $?", "1", False), Step("exit 0", "", False), Step("echo never", "never", False)]
    problems = play(steps, tmp_path, os.environ, timeout_s=20)
    assert [problem.splitlines()[0] for problem in problems] == ["$ echo 3 apples", "$ exit 0", "$ echo never"]


def test_a_step_that_hangs_is_told(tmp_path: Path) -> None:
    assert len(play([Step("true", "", False), Step("sleep 30", "", False)], tmp_path, os.environ, timeout_s=1)) >= 1


def test_every_command_of_the_page_is_a_step() -> None:
    steps = read_steps(PAGE, {8100: 9100})
    assert len(steps) == PAGE.read_text().count("\n$ ")
    assert all("8100" not in step.command for step in steps)
    assert sum(step.is_live for step in steps) > 15
