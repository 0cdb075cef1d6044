"""The words of `vllm-adapter` that belong to no one command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_adapter import __version__
from vllm_adapter.cli import main

MODULE = [sys.executable, "-m", "vllm_adapter"]


def test_the_module_is_the_command_and_says_its_version() -> None:
    done = subprocess.run([*MODULE, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"vllm-adapter {__version__}\n")


@pytest.mark.parametrize(("word", "meant"), [("statsu", "status"), ("confg", "config"), ("xyzzy", "")])
def test_a_misspelt_command_is_answered_with_the_nearest(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert (f"did you mean '{meant}'?" in said) is bool(meant)
    assert word in said


def test_a_reader_that_has_seen_enough_ends_the_command_quietly() -> None:
    with subprocess.Popen([*MODULE, "config", "--explain"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 0
