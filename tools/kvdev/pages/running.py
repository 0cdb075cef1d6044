"""Run commands of pages for real, in a folder that looks like a checkout, beside two engines' side channels on loopback."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_handshake import Codec, Listener
from kv_handshake.testing import sample_metadata
from kvdev.engines import free_port
from kvdev.paths import ROOT
from kvdev.transcripts import Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvdev.pages.commands import PageCommand

__all__ = ["Run", "Workplace", "workplace"]

_WITHIN_S = 240
_INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execvp('bash', ['bash', '-c', sys.argv[1] + '\\nexit $?'])"
)
"""Program that runs a line by bash; a job in the background ignores Ctrl-C, and so would everything that it starts.

The line is not bash's last command, so bash stays the parent of what it starts, as a reader's shell does:
`--install-completion` asks its parents which shell this is.
"""
_PROGRAMS = ("vllm-adapter", "kv-nixl", "kv-handshake", "kv-topology")
_CALL = (
    "import sys; from importlib.metadata import entry_points; sys.argv[0] = {0!r}; "
    "(one,) = entry_points(group='console_scripts', name={0!r}); sys.exit(one.load()())"
)
_FACTORS = {
    "vllm_version": "0.32.0",
    "model": "org/model",
    "num_kv_heads": 8,
    "head_size": 128,
}
_CONFIG = '{"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm_adapter", "kv_role": "kv_both"}'


@dataclass(frozen=True, slots=True)
class Run:
    """The command is run for real.

    Attributes:
        given: Words of the page, and those in their place: `{first}` and `{second}` are side channels, `{port}` is a free port.
        code: The exit code.
        prints: A pattern that the output must hold.
        is_endless: Whether the command goes on until it is interrupted; it is, as soon as it has printed `prints`.
    """

    given: tuple[tuple[str, str], ...] = ()
    code: int = 0
    prints: str = ""
    is_endless: bool = False


@dataclass(frozen=True, slots=True)
class Workplace:
    """A folder with what the pages' commands need, and words for it."""

    folder: Path
    words: Mapping[str, str]

    def run(self, command: PageCommand, way: Run) -> list[str]:
        """Run a command as its page has it; return what is wrong."""
        line = command.text
        for word, ours in way.given:
            line = re.sub(rf"(?<![\w.]){re.escape(word)}(?![\w.])", ours.format(**self.words), line)
        package = re.match(r"packages/[\w-]+(?=/README)", command.page)
        here = self.folder / package[0] if package and "packages/" not in line else self.folder
        code, output = _end(here, line, way) if way.is_endless else _finish(here, line)
        wrong = [f"exit code {code}, not {way.code}"] if code != way.code else []
        if not re.search(way.prints, output, re.MULTILINE):
            wrong.append(f"it does not print {way.prints!r}")
        if command.shown and not Step(line, command.shown, is_live=False).is_shown_by(output):
            wrong.append(f"the page shows\n{command.shown}")
        return [f"{command.place}: `{line}`: {one}; it printed\n{output}" for one in wrong]


@contextlib.contextmanager
def workplace(folder: Path) -> Iterator[Workplace]:
    """Make the folder: programs, copies of `docs` and `packages`, configurations, a recording of an engine; serve two engines."""
    for part in ("docs", "packages"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    for part in ("tools", "integration_tests", "deploy"):
        (folder / part).symlink_to(ROOT / part)
    for file in ("prefill.json", "decode.json"):
        (folder / file).write_text(_CONFIG)
    _write_programs(folder / "bin")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(folder / "bin")
    listeners = [_listener("engine-a", "torch.bfloat16"), _listener("engine-b", "torch.float16")]
    try:
        addresses = [f"127.0.0.1:{each.port}" for each in listeners]
        yield Workplace(folder, {"first": addresses[0], "second": addresses[1], "port": str(free_port())})
    finally:
        for each in listeners:
            each.close()


def _write_programs(folder: Path) -> None:
    folder.mkdir()
    calls = {name: f"-c {shlex.quote(_CALL.format(name))}" for name in _PROGRAMS}
    for name, words in {**calls, "python": "", "python3": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (folder / name).chmod(0o755)


def _listener(engine_id: str, dtype: str) -> Listener:
    """Serve an engine's metadata; the two differ in dtype, as engines do that two people start."""
    metadata: dict[str, Any] = {**sample_metadata(), "engine_id": engine_id}
    envelope = Codec().encode_envelope(metadata, {**_FACTORS, "dtype": dtype}, dialect=14, rank=(0, 0))
    listener = Listener("127.0.0.1", 0, payloads={(0, 0): envelope})
    listener.start()
    return listener


def _environment(folder: Path) -> dict[str, str]:
    top = next(each for each in (folder, *folder.parents) if (each / "bin").exists())
    own = {
        "PATH": f"{top / 'bin'}:{os.environ['PATH']}",
        "HOME": str(top),
        "COLUMNS": "200",
        "XDG_RUNTIME_DIR": str(top),
    }
    return {**os.environ, **own, "SHELL": "/bin/bash"}


def _start(folder: Path, line: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTIBLE, line], cwd=folder, env=_environment(folder), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _finish(folder: Path, line: str) -> tuple[int, str]:
    with _start(folder, line) as process:
        try:
            output, _ = process.communicate(timeout=_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 124, f"it did not end within {_WITHIN_S} s"
    return process.returncode, output


def _end(folder: Path, line: str, way: Run) -> tuple[int, str]:
    """Read until the command has printed what it must, then interrupt it as Ctrl-C does; one that ended has its own code."""
    with _start(folder, line) as process:
        overdue = threading.Timer(_WITHIN_S, os.killpg, (process.pid, signal.SIGKILL))
        overdue.start()
        output = ""
        for more in process.stdout or ():
            output += more
            if re.search(way.prints, output, re.MULTILINE):
                os.killpg(process.pid, signal.SIGINT)
                process.communicate(timeout=20)
                overdue.cancel()
                return 0, output
        overdue.cancel()
    return process.returncode, output
