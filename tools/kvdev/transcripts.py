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
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Step", "play", "read_steps"]

_BLOCK = re.compile(r"^(<!-- live -->\n)?```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Step:
    """A command and the output that the page shows.

    Attributes:
        command: The command, of one or more lines.
        shown: Its output on the page.
        is_live: Whether it needs engines.
    """

    command: str
    shown: str
    is_live: bool

    def is_shown_by(self, output: str) -> bool:
        """Return whether an output is what the page shows; spaces at the ends of lines do not count."""
        return re.fullmatch(self._pattern, _trimmed(output), re.DOTALL) is not None

    @property
    def _pattern(self) -> str:
        return ".*?".join(re.escape(part) for part in _trimmed(self.shown).split("..."))


def read_steps(page: Path, ports: Mapping[int, int] | None = None) -> list[Step]:
    """Return the steps of a page, with other ports in place of those named."""
    found: list[Step] = []
    for live, block in _BLOCK.findall(page.read_text()):
        for number, port in (ports or {}).items():
            block = re.sub(rf"\b{number}\b", str(port), block)  # noqa: PLW2901 - the same block, on this machine
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            more = next((n for n, line in enumerate(lines[1:], 1) if not line.startswith("> ")), len(lines))
            command = "\n".join([lines[0], *(line[2:] for line in lines[1:more])])
            found.append(Step(command, "\n".join(lines[more:]), bool(live)))
    return found


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
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                shell.communicate(script, timeout=timeout_s)
        finally:
            # Processes in the background are of the shell's process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait(timeout=10)
        sink.seek(0)
        output = sink.read()
    printed = output.split(mark + "\n")
    problems = []
    for number, step in enumerate(steps):
        got = printed[number] if number < len(printed) - 1 else "(it was not reached, or did not end)"
        if not step.is_shown_by(got.removesuffix("\n")):
            problems.append(f"$ {step.command}\n  printed: {got.strip()}\n  the page: {step.shown.strip()}")
    return problems


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
