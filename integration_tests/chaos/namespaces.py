"""The wire between two network namespaces, from the test's side; a reason where this machine allows none."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from kvdev.engines import die_with_parent

__all__ = ["Link", "started_link", "why_no_namespaces"]

_PROGRAM = Path(__file__).with_name("link.py")
_COMMAND = ["unshare", "-rn", sys.executable, str(_PROGRAM)]
_WITHIN_S = 10.0


@final
@dataclass
class Link:
    """Namespaces `a` and `b`, each as the files to enter it by, and the wire between them."""

    process: subprocess.Popen[str]
    a: Sequence[str]
    b: Sequence[str]

    def become(self, **faults: Any) -> dict[str, int]:
        """Set `delay_s`, `loss` and `blocked`, or none of them; return how many packets have passed and were lost so far."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(faults) + "\n")
        self.process.stdin.flush()
        answer: dict[str, int] = json.loads(_line(self.process))
        return answer


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], _WITHIN_S)[0]:
        raise TimeoutError("the wire does not answer")
    line = process.stdout.readline()
    if not line:
        _, words = process.communicate()
        raise RuntimeError(words.strip().splitlines()[-1] if words.strip() else f"it ended with {process.wait()}")
    return line


@contextlib.contextmanager
def started_link() -> Iterator[Link]:
    """Make two namespaces with a wire between them; they end with the block."""
    process = subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509  (one system call, no lock, no import)
    )
    try:
        where: dict[str, list[str]] = json.loads(_line(process))
        yield Link(process, where["a"], where["b"])
    finally:
        process.kill()
        process.communicate()


def why_no_namespaces() -> str:
    """Return why this machine has no such wire; empty if it has."""
    try:
        with started_link() as link:
            link.become()
    except (OSError, RuntimeError, TimeoutError, ValueError) as error:
        return f"no network namespaces with a wire between them here: {error}"
    return ""
