"""The Go program of this folder as a process: one request per line, one answer per line."""

from __future__ import annotations

from typing import Any, final

from line_process import LineProcess

__all__ = ["Gopher"]


@final
class Gopher(LineProcess):
    """Asks the program: an answer is `{"ok": result}` or `{"code": ..., "message": ...}`."""

    def ok(self, do: str, **request: object) -> Any:
        """Return the result; a refusal fails the test."""
        answer = self.ask(do=do, **request)
        assert "ok" in answer, answer
        return answer["ok"]

    def code(self, do: str, **request: object) -> str:
        """Return the code of a refusal, "" where there is a result."""
        return str(self.ask(do=do, **request).get("code", ""))
