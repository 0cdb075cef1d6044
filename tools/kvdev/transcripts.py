"""Run the commands of a page in order, in one shell, and compare what each prints with what the page shows.

A command begins with `$ `, goes on in lines that begin with `> `, and its output follows. `...` in it stands for any text, a line
`...` for any lines. Blocks below a line `<!-- live -->` need engines; ports are given anew, so that pages may name round ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^(<!-- live -->\n)?```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STEP = re.compile(r"^\$ (.*(?:\n> .*)*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


class Step(NamedTuple):
    """A command, the output that the page shows, and whether it needs engines."""

    command: str
    shown: str
    is_live: bool


def read_steps(page: Path, others: Mapping[int, int] | Mapping[str, str] | None = None) -> list[Step]:
    """Return the steps of a page, with other ports and names in place of those given."""
    text = page.read_text()
    for name, other in (others or {}).items():
        text = re.sub(rf"\b{name}\b", str(other), text)
    return [
        Step(command.replace("\n> ", "\n"), shown, bool(live))
        for live, block in _BLOCK.findall(text)
        for command, shown in _STEP.findall(block)
    ]


def play(steps: Sequence[Step], folder: Path, environment: Mapping[str, str], *, timeout_s: float) -> list[str]:
    """Run the steps in one shell in `folder`; return a line for each step that printed something else.

    A step that ends the shell, or does not end within the time, leaves those behind it unplayed: they are among the lines.
    Processes that the page put into the background are killed at the end.
    """
    mark = secrets.token_hex(8)
    script = "\n".join(f"{{ {step.command}\n}} 2>&1\necho; echo {mark}" for step in steps)
    with tempfile.TemporaryFile("w+") as sink:
        shell = subprocess.Popen(
            ["bash", "-s"], cwd=folder, env=dict(environment), text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=sink, stderr=subprocess.STDOUT,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            shell.communicate(script, timeout=timeout_s)
        # Processes in the background are of the shell's process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait(timeout=10)
        sink.seek(0)
        printed = sink.read().split(mark + "\n")
    problems = []
    for number, step in enumerate(steps):
        got = printed[number] if number < len(printed) - 1 else "(it was not reached, or did not end)"
        pattern = ".*?".join(re.escape(part) for part in _trimmed(step.shown).split("..."))
        if re.fullmatch(pattern, _trimmed(got), re.DOTALL) is None:
            problems.append(f"$ {step.command}\n  printed: {got.strip()}\n  the page: {step.shown.strip()}")
    return problems


def _trimmed(text: str) -> str:
    """Return a text without spaces at the ends of its lines."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
