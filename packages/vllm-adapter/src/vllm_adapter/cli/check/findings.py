"""Findings of the pre-flight check: what was looked at, whether it forbids a hand-over, why, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, final

from vllm_adapter.observe.cause_log import plain_text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Finding", "Findings", "Topic"]

Topic = Literal["reach", "ranks", "factors", "plan", "lease", "keys", "seals", "transport", "reads", "clock"]
Level = Literal["ok", "note", "no-go"]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        level: `ok`; `note` for what an operator should know, or what could not be looked at; `no-go`.
        topic: Subject of the check.
        code: Stable, kebab-case; empty for `ok`.
        message: The result, with names and numbers.
        advice: The next step; empty if nothing is to be done.
    """

    level: Level
    topic: Topic
    code: str
    message: str
    advice: str = ""


@final
class Findings:
    """All findings of a check, in the order in which they were made."""

    def __init__(self) -> None:
        self.made: list[Finding] = []

    def ok(self, topic: Topic, message: str) -> None:
        """Note that something is as it should be."""
        self.made.append(Finding("ok", topic, "", message))

    def note(self, topic: Topic, code: str, message: str, advice: str = "") -> None:
        """Note what an operator should know, but which forbids nothing."""
        self.made.append(Finding("note", topic, code, message, advice))

    def refuse(self, topic: Topic, code: str, message: str, advice: str = "", *, is_allowed: bool = False) -> None:
        """Note a reason against a hand-over; only a note if the operator allows it."""
        self.made.append(Finding("note" if is_allowed else "no-go", topic, code, message, advice))

    @property
    def is_go(self) -> bool:
        """Whether nothing forbids a hand-over."""
        return all(finding.level != "no-go" for finding in self.made)

    def as_values(self) -> list[Mapping[str, object]]:
        """Return the findings as plain values."""
        return [asdict(finding) for finding in self.made]

    def as_text(self) -> str:
        """Return a line per finding, and its advice under it."""
        lines: list[str] = []
        for each in self.made:
            code = f" ({each.code})" if each.code else ""
            lines.append(f"{each.level:5}  {each.topic:9}  {plain_text(each.message)}{code}")
            if each.advice:
                lines.append(f"{'':18}-> {plain_text(each.advice)}")
        return "\n".join([*lines, self.summary])

    @property
    def summary(self) -> str:
        """Go or no-go, and the number of reasons."""
        reasons = sum(finding.level == "no-go" for finding in self.made)
        return "GO" if self.is_go else f"NO GO: {reasons} reason{'s' if reasons > 1 else ''}"
