"""Adds up the reports of an engine's ranks as vLLM does: an id counts once every rank has reported it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

from vllm_adapter.steps import RankRegistration, ReadFailure, StepReport

__all__ = ["Gathered", "Ranks"]

Rank = tuple[int, int]


@final
@dataclass(slots=True)
class Gathered:
    """Reports of one step; `failed` is the part of `received` that failed on some rank."""

    sent: list[str] = field(default_factory=list[str])
    received: list[str] = field(default_factory=list[str])
    failed: set[str] = field(default_factory=set[str])
    registrations: dict[Rank, RankRegistration] = field(default_factory=dict[Rank, RankRegistration])
    reasons: dict[str, dict[Rank, ReadFailure]] = field(default_factory=dict[str, dict[Rank, ReadFailure]])


@final
class Ranks:
    """Remembers which ids some ranks have reported and others have not."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._reported: Counter[tuple[str, str]] = Counter()
        self._failed: set[str] = set()

    def add(self, reports: Iterable[tuple[Rank, StepReport]]) -> Gathered:
        """Add the reports of a step."""
        step = Gathered()
        for rank, report in reports:
            self._failed |= report.failed
            for request_id, reason in sorted(report.reasons.items()):
                step.reasons.setdefault(request_id, {})[rank] = reason
            if report.registration is not None:
                step.registrations[rank] = report.registration
            for kind, ids, ended in (("sent", report.sent, step.sent), ("received", report.received, step.received)):
                for request_id in sorted(ids):
                    self._reported[kind, request_id] += 1
                    if self._reported[kind, request_id] == self._count:
                        del self._reported[kind, request_id]
                        ended.append(request_id)
        step.failed = self._failed & set(step.received)
        self._failed -= step.failed
        return step
