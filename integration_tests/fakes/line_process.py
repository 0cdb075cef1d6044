"""A process that answers each line of JSON on its standard input with one on its standard output."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any


class LineProcess:
    """The process of a command; if it ends early, the test that asks fails."""

    def __init__(self, command: Sequence[object], **options: Any) -> None:
        words = [str(word) for word in command]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
        self._process: subprocess.Popen[str] = subprocess.Popen(words, **pipes, **options)
        self.pid = self._process.pid

    def ask(self, **request: object) -> Any:
        """Send a request and return its answer."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"{self._process.args!r} ended with {self._process.wait(10)}"
        return json.loads(line)

    def end(self, within_s: float = 30) -> int:
        """Close its input, at which it ends by itself, else kill it; return its exit code."""
        try:
            self._process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        return self._process.returncode
