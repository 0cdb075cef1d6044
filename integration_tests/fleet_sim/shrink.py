"""Shrink a failing plan: leave out requests, faults and configuration as long as the same promise is broken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

from episode import Outcome, play
from plan import EnginePlan, EpisodePlan, RequestPlan
from planted import Fault

__all__ = ["shrink"]

Item = TypeVar("Item")
Plan = TypeVar("Plan", RequestPlan, EnginePlan)


def shrink(plan: EpisodePlan, fault: Fault | None = None, *, within_s: float = 60.0) -> Outcome:
    """Return the outcome of a smaller plan that breaks the same promise as a plan does, with a planted fault or none."""
    best = play(plan, fault)
    wanted, until_s = best.violations[0].kind, time.monotonic() + within_s
    goes_on = True
    while goes_on and time.monotonic() < until_s:
        goes_on = False
        for smaller in _smaller(best.plan):
            if time.monotonic() > until_s:
                break
            found = play(smaller, fault)
            if found.violations and found.violations[0].kind == wanted:
                best, goes_on = found, True
                break
    return best


def _smaller(plan: EpisodePlan) -> Iterator[EpisodePlan]:
    """Yield plans with less in them, those with much less first."""
    for requests in _parts(plan.requests):
        if requests:
            yield replace(plan, requests=requests)
    for faults in _parts(plan.faults):
        yield replace(plan, faults=faults)
    for at, request in enumerate(plan.requests):
        for simpler in _plainer(request, new_tokens=1, tokens=min(request.tokens, 8)):
            yield replace(plan, requests=(*plan.requests[:at], simpler, *plan.requests[at + 1 :]))
    if len(plan.fleet.groups) > 1:
        yield replace(plan, fleet=replace(plan.fleet, groups=plan.fleet.groups[:1]))
    for at, engine in enumerate(plan.fleet.engines):
        for plainer in _plainer(engine, tp=1, has_lag=False, order="HND"):
            engines = (*plan.fleet.engines[:at], plainer, *plan.fleet.engines[at + 1 :])
            yield replace(plan, fleet=replace(plan.fleet, engines=engines))
    for changed in ({"is_bidirectional": False}, {"is_sealed": False}, {"read_retries": 0}):
        if any(getattr(plan.fleet, name) != value for name, value in changed.items()):
            yield replace(plan, fleet=replace(plan.fleet, **changed))


def _parts(items: tuple[Item, ...]) -> Iterator[tuple[Item, ...]]:
    """Yield the items without some of them: without all, without either half, and so on."""
    size = len(items)
    while size >= 1:
        for at in range(0, len(items), size):
            yield items[:at] + items[at + size :]
        size //= 2


def _plainer(item: Plan, **plain: object) -> Iterator[Plan]:
    """Yield an item with one field at its default, or as plain as is said."""
    for field in fields(item):
        value = plain.get(field.name, field.default)
        if value is not MISSING and getattr(item, field.name) != value:
            changed: Any = {field.name: value}
            yield replace(item, **changed)
