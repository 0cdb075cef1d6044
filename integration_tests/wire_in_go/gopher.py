"""The Go program of this folder as a process: one request per line, one answer per line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, final

__all__ = ["Gopher"]


@final
class Gopher:
    """Asks the program; a program that has died fails the test that asks."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def answer(self, do: str, **request: object) -> dict[str, Any]:
        """Return `{"ok": result}` or `{"code": ..., "message": ...}`."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the Go program ended with {self._process.wait(10)} on {do} {request}"
        return json.loads(line)

    def ok(self, do: str, **request: object) -> Any:
        """Return the result; a refusal fails the test."""
        answer = self.answer(do, **request)
        assert "ok" in answer, answer
        return answer["ok"]

    def code(self, do: str, **request: object) -> str:
        """Return the code of a refusal, "" where there is a result."""
        return self.answer(do, **request).get("code", "")

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        self._process.stdout.close()
