"""The four command lines are one family: examples, JSON, exit codes, versions, hints, completion, no traceback."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kv_handshake.inspect import Recording
from kv_handshake.testing import sample_envelopes
from kvdev.paths import PACKAGES, ROOT, project_of

COMMAND_LINES = {
    "kv-handshake": ("kv_handshake", "kv_handshake.cli"),
    "kv-nixl": ("kv_nixl_agent", "kv_nixl_agent.tools.cli"),
    "kv-topology": ("kv_topology", "kv_topology.tools.cli"),
    "vllm-adapter": ("vllm_adapter", "vllm_adapter.cli.command"),
}
WITHOUT_JSON = {("kv-nixl", "serve")}
EXAMPLE = str(ROOT / "packages/kv-topology/src/kv_topology/tools/example.toml")
PROGRAMS: dict[str, Any] = {name: get_command(import_module(cli).app) for name, (_, cli) in COMMAND_LINES.items()}
COMMANDS = [(name, command) for name in COMMAND_LINES for command in PROGRAMS[name].commands]


def run(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120", **variables}
    command = [sys.executable, "-m", COMMAND_LINES[name][0], *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def ended(name: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """Run a command in this process; return what it ends with, and its output."""
    try:
        code: object = import_module(COMMAND_LINES[name][1]).main(list(words))
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_each_program_is_an_entry_point_of_its_package_and_needs_the_extra_cli() -> None:
    projects = [project_of(ROOT / "packages" / package) for package in PACKAGES]
    programs = {name: entry for project in projects for name, entry in project.get("scripts", {}).items()}
    assert programs == {name: f"{module}.__main__:main" for name, (module, _) in COMMAND_LINES.items()}
    for project in projects:
        assert not [need for need in project["dependencies"] if need.startswith(("typer", "rich"))]
        assert "scripts" not in project or "typer" in " ".join(project["optional-dependencies"]["cli"])


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_help_has_an_example_and_exit_codes(name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = ended(name, capsys, command, "--help")
    assert code == 0
    assert f"\n    {name} {command}" in text, "an example that begins with the command"
    assert "exit codes:" in text
    options = {word for option in PROGRAMS[name].commands[command].params for word in option.opts}
    assert ("--json" in options) is ((name, command) not in WITHOUT_JSON)


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_a_misspelt_command_and_a_misspelt_option_are_answered_with_the_nearest(
    name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, nearest in (([command + "x"], f"'{command}'"), ([command, "--jsn"], "--json")):
        code, text, error = ended(name, capsys, *words)
        assert (code, text) == (2, "")
        assert nearest in error or (name, command) in WITHOUT_JSON


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_program_shows_its_version_completes_its_commands_and_names_its_extra(name: str, tmp_path: Path) -> None:
    done = run(name, "--version")
    assert (done.returncode, done.stderr, done.stdout.startswith(f"{name} 0.")) == (0, "", True)
    variable = f"_{name.upper().replace('-', '_')}_COMPLETE"
    completed = run(name, **{variable: "complete_bash", "COMP_WORDS": f"{name} ", "COMP_CWORD": "1"})
    assert completed.stdout.split() == list(PROGRAMS[name].commands)
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('No module named typer', name='typer')\n")
    done = run(name, "--version", PYTHONPATH=str(tmp_path))
    package = name.replace("kv-nixl", "kv-nixl-agent")
    hint = f"{name}: the command line is not installed: uv pip install '{package}[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", hint)
    (tmp_path / "typer.py").write_text("import nowhere\n")
    done = run(name, "--version", PYTHONPATH=str(tmp_path))
    assert (done.returncode, "No module named 'nowhere'" in done.stderr) == (1, True), "it is not hidden"


PIPED = [
    *((name, command, "--help") for name, command in COMMANDS if name != "kv-topology"),
    ("kv-handshake", "vectors"),
    ("kv-handshake", "keygen", "{folder}", "engine"),
    ("kv-handshake", "serve", "{recording}"),
    ("kv-topology", "plan", EXAMPLE, "--json"),
    ("kv-topology", "explain", EXAMPLE, "--slices", "64"),
    ("vllm-adapter", "config", "--explain"),
    ("vllm-adapter", "status", "--json", "--folder", "{folder}"),
]


@pytest.mark.parametrize("words", PIPED, ids=lambda words: " ".join(words[:2]))
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(words: tuple[str, ...], tmp_path: Path) -> None:
    Recording(14, sample_envelopes()).write(tmp_path / "recording.json")
    name, *rest = (word.format(folder=tmp_path, recording=tmp_path / "recording.json") for word in words)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", COMMAND_LINES[name][0], *rest]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert done.returncode in {0, 3}, done.stderr  # 3: status found no engine
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_a_terminal_shows_a_table_and_a_pipe_gets_plain_text() -> None:
    words, shown = ("vllm-adapter", "check", "127.0.0.1:1", "127.0.0.1:2", "--timeout", "1"), "NO GO: 2 reasons"
    piped = run(*words)
    assert shown in piped.stdout
    assert "\x1b" not in piped.stdout
    assert "\u2500" not in piped.stdout
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", COMMAND_LINES[words[0]][0], *words[1:]]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as program:
        os.close(theirs)
        drawn = b""
        with contextlib.suppress(OSError):  # the terminal ends with the program
            while chunk := os.read(ours, 4096):
                drawn += chunk
    os.close(ours)
    assert program.returncode == piped.returncode
    assert shown in drawn.decode()
    assert b"\x1b[" in drawn
