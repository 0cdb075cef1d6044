"""The words of `vllm-adapter` that belong to no one command."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from vllm_adapter.cli.check.findings import NOTES
from vllm_adapter.cli.command import app

PAGES = Path(__file__).parents[3] / "docs" / "operate"

MODULE = [sys.executable, "-m", "vllm_adapter"]


@pytest.mark.parametrize(
    "words",
    [["--version"], ["config", "--explain"], ["status", "--json"], ["trace"], ["check", "--help"]],
    ids=" ".join,
)
def test_a_command_that_asks_no_side_channel_loads_no_library(words: list[str]) -> None:
    """An operator's look costs no NumPy, no ZMQ, no NIXL, and cannot fall with them."""
    code = f"""
import sys
from vllm_adapter.__main__ import main
try:
    main({words!r})
except SystemExit:
    pass
heavy = {{"kv_handshake", "kv_nixl_agent", "kv_scheduler_state", "kv_topology", "nixl", "numpy", "torch", "vllm", "zmq"}}
sys.exit(repr(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "set()"


def test_a_crash_of_native_code_shows_where(tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with (
        subprocess.Popen([*MODULE, "config", "--check", str(pipe)], stderr=subprocess.PIPE, text=True) as command,
        pipe.open("w"),  # opens as soon as the command reads
    ):
        command.send_signal(signal.SIGSEGV)
        _, said = command.communicate(timeout=30)
    assert command.returncode == -signal.SIGSEGV
    assert said.startswith("Fatal Python error: Segmentation fault")
    assert "vllm_adapter/cli/" in said


@pytest.mark.parametrize("page", ["check.md", "status.md", "trace.md"])
def test_the_commands_of_a_page_are_understood(page: str) -> None:
    commands = re.findall(r"^(?:\|.*\| `)?vllm-adapter ([^`\n]*)", (PAGES / page).read_text(), re.MULTILINE)
    assert commands
    program = get_command(app)
    assert isinstance(program, TyperGroup)
    for line in commands:
        name, *words = shlex.split(line)
        assert callable(program.commands[name].make_context(name, words).command.callback)


def test_every_note_of_the_check_is_on_its_page() -> None:
    page = (PAGES / "check.md").read_text()
    assert [code for code in sorted(NOTES) if f"`{code}`" not in page] == []


def test_an_engine_loads_no_room_of_the_command_line() -> None:
    code = """
import sys
import vllm_adapter.observe.answers, vllm_adapter.plugin
import vllm_adapter.scheduler.side, vllm_adapter.wiring, vllm_adapter.worker.engine_thread

rooms = ("vllm_adapter.cli", "vllm_adapter.__main__", "kv_handshake.inspect", "typer", "rich")
sys.exit(repr([name for name in sys.modules if name.startswith(rooms)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]"
