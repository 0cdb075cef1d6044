"""The scope gpu as a person asks for it: recorded where there is a GPU, red where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvdev import testing
from kvdev.steps import DevError
from kvdev.testing import GPU_PAGE, RunOptions, run_tests


def _ran(monkeypatch: pytest.MonkeyPatch, *, has_gpu: bool) -> list[list[Any]]:
    commands: list[list[Any]] = []
    monkeypatch.setattr(testing, "_has_gpu", lambda: has_gpu)
    monkeypatch.setattr(testing, "_pytest", lambda name, *_words: commands.append([name]))
    monkeypatch.setattr(testing, "run_step", lambda _name, command, **_more: commands.append(command))
    return commands


def test_record_runs_the_stage_and_writes_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = _ran(monkeypatch, has_gpu=True)
    assert run_tests(Path("uv"), ["gpu"], RunOptions(is_recorded=True)) == 0
    assert commands[0] == ["gpu"]
    assert commands[1][-2:] == ["--record", GPU_PAGE]
    assert run_tests(Path("uv"), ["gpu"], RunOptions()) == 0
    assert commands[2:] == [["gpu"]]


def test_without_a_gpu_nothing_runs_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = _ran(monkeypatch, has_gpu=False)
    assert run_tests(Path("uv"), ["gpu"], RunOptions(is_recorded=True)) == 1
    assert not commands
    assert "not run: gpu" in capsys.readouterr().out


def test_record_is_for_the_gpu_alone() -> None:
    with pytest.raises(DevError, match="gpu alone"):
        run_tests(Path("uv"), ["gpu", "sim"], RunOptions(is_recorded=True))
