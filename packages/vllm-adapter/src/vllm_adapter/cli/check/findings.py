"""Findings of the pre-flight check: every code with its level and advice, and the report."""

from __future__ import annotations

from typing import final

import typer

from vllm_adapter.codes import advice_on
from vllm_adapter.observe.recorder import plain_text

__all__ = ["NOTES", "Findings"]

NOTES = frozenset({
    "size-not-proven", "may-differ", "no-fences", "no-probe-pages", "not-measured", "measured-elsewhere", "plan-not-known",
    "terms-not-known", "one-heartbeat-to-spare", "seals-not-verified", "unsealed-tickets",
})  # fmt: skip
"""Codes that an operator should know, or that say what was not checked; any other code is a no-go."""
_COLOURS = {"ok": "green", "note": "yellow", "no-go": "red"}


@final
class Findings:
    """All findings of a check.

    Attributes:
        made: The findings in order: `level` ("ok", "note" or "no-go"), `topic`, `code`, `message` and `advice`; code and advice
            are empty if all is well.
    """

    def __init__(self) -> None:
        self._notes = set(NOTES)
        self.made: list[dict[str, str]] = []

    def allow(self, *codes: str) -> None:
        """Take these reasons against a hand-over as notes: the operator accepts them."""
        self._notes.update(codes)

    def ok(self, topic: str, message: str) -> None:
        """Add a result that is as it should be."""
        self.made.append({"level": "ok", "topic": topic, "code": "", "message": message, "advice": ""})

    def add(self, topic: str, code: str, message: str, advice: str | None = None) -> None:
        """Add a reason against a hand-over, or a note, see `NOTES`; without `advice` the code's own is given."""
        level, advice = "note" if code in self._notes else "no-go", advice_on(code) if advice is None else advice
        self.made.append({"level": level, "topic": topic, "code": code, "message": message, "advice": advice})

    @property
    def is_go(self) -> bool:
        """Whether nothing forbids a hand-over."""
        return all(each["level"] != "no-go" for each in self.made)

    def as_text(self) -> str:
        """Return a line per finding, its advice under it, and the verdict; `typer.echo` shows colours on a terminal alone."""
        lines: list[str] = []
        for each in self.made:
            code = f" ({each['code']})" if each["code"] else ""
            level = typer.style(f"{each['level']:5}", fg=_COLOURS[each["level"]])
            lines.append(f"{level}  {each['topic']:9}  {plain_text(each['message'])}{code}")
            if each["advice"]:
                lines.append(f"{'':18}-> {plain_text(each['advice'])}")
        reasons = sum(each["level"] == "no-go" for each in self.made)
        return "\n".join([*lines, f"NO GO: {reasons} reason{'s' if reasons > 1 else ''}" if reasons else "GO"])
