"""Adds up the reports of an engine's ranks as vLLM does: an id counts once every rank has reported it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import final

from vllm_adapter.steps import StepReport


@final
class Ranks:
    """Remembers which ids some ranks have reported and others have not."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._reported: Counter[tuple[str, str]] = Counter()
        self._failed: set[str] = set()

    def add(self, reports: Iterable[StepReport]) -> StepReport:
        """Add the reports of a step; `failed` is the part of `received` that failed on some rank."""
        reports, sent, received = list(reports), list[str](), list[str]()
        for report in reports:
            self._failed.update(report.failed)
            for kind, ids, ended in (("sent", report.sent, sent), ("received", report.received, received)):
                for request_id in sorted(ids):
                    self._reported[kind, request_id] += 1
                    if self._reported[kind, request_id] == self._count:
                        del self._reported[kind, request_id]
                        ended.append(request_id)
        failed = self._failed.intersection(received)
        self._failed -= failed
        whole = reduce(StepReport.aggregate, reports, StepReport())
        return replace(whole, sent=sent, received=received, failed=failed)
