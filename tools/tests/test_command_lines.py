"""The four command lines are one family: examples, JSON, exit codes, versions, hints, completion, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kv_handshake.inspect import Recording
from kv_handshake.testing import sample_envelopes
from kvdev.paths import PACKAGES, ROOT

COMMAND_LINES = {
    "kv-handshake": ("kv_handshake", "kv_handshake.cli"),
    "kv-nixl": ("kv_nixl_agent", "kv_nixl_agent.tools.cli"),
    "kv-topology": ("kv_topology", "kv_topology.tools.cli"),
    "vllm-adapter": ("vllm_adapter", "vllm_adapter.cli.command"),
}
DISTRIBUTIONS = {"kv-nixl": "kv-nixl-agent"}
WITHOUT_JSON = {("kv-nixl", "serve")}
EXAMPLE = str(ROOT / "packages" / "kv-topology" / "examples" / "gqa_tp4_from_tp2.toml")


def program_of(name: str) -> TyperGroup:
    program = get_command(import_module(COMMAND_LINES[name][1]).app)
    assert isinstance(program, TyperGroup)
    return program


COMMANDS = [(name, command) for name in COMMAND_LINES for command in program_of(name).commands]


def run(name: str, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}
    command = [sys.executable, "-m", COMMAND_LINES[name][0], *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def ended(name: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """Run a command in this process; return what it ends with, and what it says."""
    try:
        code: object = import_module(COMMAND_LINES[name][1]).main(list(words))
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_each_program_is_an_entry_point_of_its_package_and_needs_the_extra_cli() -> None:
    programs: dict[str, str] = {}
    for package in PACKAGES:
        project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
        programs |= project.get("scripts", {})
        if "scripts" in project:
            needs = " ".join(project["optional-dependencies"]["cli"])
            assert "typer" in needs
            assert not [need for need in project["dependencies"] if need.startswith(("typer", "rich"))]
    assert programs == {name: f"{module}.__main__:main" for name, (module, _) in COMMAND_LINES.items()}


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_help_has_an_example_and_exit_codes(name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = ended(name, capsys, command, "--help")
    assert code == 0
    assert f"\n    {name} {command}" in text, "an example that begins with the command"
    assert "exit codes:" in text
    described = program_of(name).commands[command]
    assert isinstance(described, TyperCommand)
    options = {word for option in described.params for word in option.opts}
    assert ("--json" in options) is ((name, command) not in WITHOUT_JSON)


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_a_misspelt_command_and_a_misspelt_option_are_answered_with_the_nearest(
    name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, error = ended(name, capsys, command + "x")
    assert (code, text) == (2, "")
    assert "Did you mean" in error
    assert f"'{command}'" in error.partition("Did you mean")[2]
    if (name, command) not in WITHOUT_JSON:
        code, text, error = ended(name, capsys, command, "--jsn")
        assert (code, text) == (2, "")
        assert "--json" in error


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_module_says_its_version_and_completes_its_commands(name: str) -> None:
    done = run(name, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{name} 0.")
    shell = {
        f"_{name.upper().replace('-', '_')}_COMPLETE": "complete_bash",
        "COMP_WORDS": f"{name} ",
        "COMP_CWORD": "1",
        "PATH": os.environ["PATH"],
    }
    command = [sys.executable, "-m", COMMAND_LINES[name][0]]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=shell)
    assert completed.stdout.split() == list(program_of(name).commands)


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_without_its_extra_a_program_says_in_one_line_what_to_install(name: str, tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('No module named typer', name='typer')\n")
    done = run(name, "--version", path=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    package = DISTRIBUTIONS.get(name, name)
    assert done.stderr == f"{name}: the command line is not installed: uv pip install '{package}[cli]'\n"


def test_another_module_that_is_missing_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import nowhere\n")
    done = run("kv-handshake", "--version", path=str(tmp_path))
    assert done.returncode == 1
    assert "No module named 'nowhere'" in done.stderr


PIPED = [
    ("kv-handshake", "--help"),
    ("kv-handshake", "probe", "--help"),
    ("kv-handshake", "vectors"),
    ("kv-handshake", "keygen", "{folder}", "engine"),
    ("kv-handshake", "serve", "{recording}"),
    ("kv-nixl", "doctor", "--help"),
    ("kv-nixl", "serve", "--help"),
    ("kv-nixl", "measure", "--help"),
    ("kv-topology", "plan", EXAMPLE, "--json"),
    ("kv-topology", "explain", EXAMPLE, "--slices", "64"),
    ("vllm-adapter", "config", "--explain"),
    ("vllm-adapter", "check", "--help"),
    ("vllm-adapter", "trace", "--list"),
    ("vllm-adapter", "revoke", "prefill-0", "--folder", "{folder}"),
    ("vllm-adapter", "status", "--json", "--folder", "{folder}"),
    ("vllm-adapter", "trace", "--help"),
]


def test_every_command_is_tried_with_a_closed_pipe() -> None:
    assert {words[:2] for words in PIPED} >= set(COMMANDS)


@pytest.mark.parametrize("words", PIPED, ids=lambda words: " ".join(words[:2]))
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(words: tuple[str, ...], tmp_path: Path) -> None:
    Recording(14, sample_envelopes()).write(tmp_path / "recording.json")
    name, *rest = (word.format(folder=tmp_path, recording=tmp_path / "recording.json") for word in words)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", COMMAND_LINES[name][0], *rest]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True) as program:
        os.close(writer)
        assert program.stderr is not None
        error = program.stderr.read()
        assert program.wait(60) in {0, 3}, error  # 3: status found no engine
    assert "Traceback" not in error
    assert "BrokenPipe" not in error


def test_a_terminal_shows_a_table_and_a_pipe_gets_plain_text() -> None:
    words, shown = ("vllm-adapter", "check", "127.0.0.1:1", "127.0.0.1:2", "--timeout", "1"), "NO GO: 2 reasons"
    piped = run(*words)
    assert shown in piped.stdout
    assert "\x1b" not in piped.stdout
    assert "\u2500" not in piped.stdout
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", COMMAND_LINES[words[0]][0], *words[1:]]
    terminal = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=terminal) as program:
        os.close(theirs)
        drawn = b""
        while chunk := _read(ours):
            drawn += chunk
    os.close(ours)
    assert program.returncode == piped.returncode
    assert shown in drawn.decode()
    assert b"\x1b[" in drawn


def _read(terminal: int) -> bytes:
    """Read from a terminal's other end, which fails when the program has ended."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
