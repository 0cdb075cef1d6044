"""Counts of a call of pytest: cases by their end, reasons of skipped ones, cases that took long."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Tally", "count_cases", "last_part", "slow_cases"]


@dataclass(slots=True)
class Tally:
    """Counts of one or of many calls."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    not_run: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    durations: list[tuple[str, float]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    def fail(self, name: str) -> None:
        """Count a failure that no case reports."""
        self.failed += 1
        self.failures.append(name)

    def add(self, other: Tally) -> None:
        """Add the counts of another call."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.not_run += other.not_run
        self.failures += other.failures
        self.durations += other.durations
        self.reasons += other.reasons
        self.slow += other.slow


def count_cases(report: Path) -> tuple[int, int, int, Counter[tuple[str, str]]]:
    """Return how many cases passed, failed and were skipped, and how many of which test for which reason."""
    reasons: Counter[tuple[str, str]] = Counter()
    if not report.exists():
        return 0, 1, 0, reasons
    passed = failed = skipped = 0
    for case in ET.parse(report).getroot().iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is not None:
            skipped += 1
            test = f"{case.get('classname', '')}::{case.get('name', '').partition('[')[0]}"
            reasons[test, skip.get("message", "")] += 1
        else:
            passed += 1
    return passed, failed, skipped, reasons


def slow_cases(report: Path, slow_s: float) -> list[str]:
    """Return the cases of a report that took longer than `slow_s` without the set-up that they share."""
    cases = ET.parse(report).getroot().iter("testcase") if report.exists() else ()
    return [
        f"{case.get('classname', '')}::{case.get('name', '')} ({float(case.get('time', 0)):.1f} s)"
        for case in cases
        if float(case.get("time", 0)) > slow_s
    ]


def last_part(log: Path, lines: int = 120) -> str:
    """Return the end of a log with its name."""
    return f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
