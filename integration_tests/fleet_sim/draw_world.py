"""Draw what a plan has beyond its plain fleet: kinds of groups, prefix caches, mirrors, resets, sleep, ids sent again.

The numbers come from a source of their own, so that the plain part of a seed's plan stays what it is. Each part is drawn for some
of the seeds, and several parts often meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from plan import EnginePlan, EpisodePlan, FaultPlan, GroupPlan, RequestPlan

Part = Callable[[random.Random, EpisodePlan], EpisodePlan]


def parts_of(plan: EpisodePlan, parts: Sequence[tuple[Part, float]]) -> EpisodePlan:
    """Return a plan with some of these parts, each with its probability."""
    draw = random.Random(f"{plan.seed}/world")
    # Each look costs an event: coarse ones are cheap, and only some seeds need fine ones.
    poll_s, tick_parts = draw.choice(((0.02, 12), (0.08, 6), (0.08, 6), (0.08, 6)))
    plan = replace(plan, fleet=replace(plan.fleet, poll_s=poll_s, tick_parts=tick_parts))
    for part, share in parts:
        if draw.random() < share:
            plan = part(draw, plan)
    if plan.fleet.has_state:  # a state cannot be set back, so that every request must end with its sample
        plan = replace(plan, fleet=replace(plan.fleet, ends_at_sample=True))
    return plan


def with_engines(plan: EpisodePlan, change: Callable[[EnginePlan], EnginePlan], **fleet: Any) -> EpisodePlan:
    """Return a plan with each engine changed, and with other values of its fleet."""
    engines = tuple(change(engine) for engine in plan.fleet.engines)
    return replace(plan, fleet=replace(plan.fleet, engines=engines, **fleet))


def _kinds(draw: random.Random, plan: EpisodePlan) -> EpisodePlan:
    """Latent groups, or a state beside what there is, or a state alone."""
    groups, how = plan.fleet.groups, draw.choice(("latent", "latent", "state", "state", "latent-state", "state-alone"))
    if how.startswith("latent"):
        groups = tuple(GroupPlan(0, group.layers, "latent") for group in groups)
    if how == "state-alone":
        groups = ()
    if "state" in how:
        groups = (*groups[:2], GroupPlan(0, draw.choice((1, 2)), "state"))
    return _roomy(replace(plan, fleet=replace(plan.fleet, groups=groups, state_groups=draw.choice((1, 2)))))


def _roomy(plan: EpisodePlan) -> EpisodePlan:
    """Give every engine blocks for a state's request more."""
    return with_engines(plan, lambda engine: replace(engine, blocks=engine.blocks + 12))


def _prefixes(draw: random.Random, plan: EpisodePlan) -> EpisodePlan:
    """Prefix caches on some engines, and prompts that begin alike."""
    plan = with_engines(plan, lambda engine: replace(engine, has_prefix_cache=draw.random() < 0.8))
    families = draw.choice((1, 1, 2))

    def shared(request: RequestPlan) -> RequestPlan:
        if draw.random() < 0.25:
            return request
        tokens = draw.choice((request.tokens, draw.randint(1, 40), 16, 24))
        same = draw.choice((tokens, 8, 16, draw.randint(1, tokens)))
        return replace(request, tokens=tokens, family=draw.randrange(families), family_tokens=min(tokens, same))

    requests = [shared(request) for request in plan.requests]
    more = [
        replace(request, name=f"{request.name}x", at_s=request.at_s + draw.choice((0.0, 0.01, 0.1, 0.5)))
        for request in requests
        if draw.random() < 0.3
    ]
    return replace(plan, requests=(*requests, *more))


def _mirrors(draw: random.Random, plan: EpisodePlan) -> EpisodePlan:
    """Host-buffer mode on some engines, which excludes readback; copies may fail for a while."""
    plan = with_engines(plan, lambda engine: replace(engine, has_mirror=draw.random() < 0.7), is_bidirectional=False)
    plan = replace(plan, requests=tuple(replace(request, turns=1) for request in plan.requests))
    return (
        _with_faults(plan, _few(draw, plan, "mirror", lambda: draw.choice((0.05, 0.5))))
        if draw.random() < 0.4
        else plan
    )


def _resets(draw: random.Random, plan: EpisodePlan) -> EpisodePlan:
    """Cache resets, with and without preemption of what runs."""
    return _with_faults(plan, _few(draw, plan, "reset", lambda: 0.0))


def _sleeps(draw: random.Random, plan: EpisodePlan) -> EpisodePlan:
    """Engines that give their memory back for a while."""
    return _with_faults(plan, _few(draw, plan, "sleep", lambda: draw.choice((0.05, 0.5, 3.0)) * draw.random()))


def _few(draw: random.Random, plan: EpisodePlan, kind: str, duration_s: Callable[[], float]) -> list[FaultPlan]:
    """Return some faults, most of them while a request of the plan is under way."""
    found: list[FaultPlan] = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        engine, at_s = draw.randrange(len(plan.fleet.engines)), draw.uniform(0.0, plan.fleet.faults_end_s)
        if draw.random() < 0.8:
            aim = draw.choice(plan.requests)
            engine = draw.choice((aim.prefill, aim.decode))
            at_s = min(plan.fleet.faults_end_s, aim.at_s + aim.router_s + draw.random() * draw.choice((0.05, 0.4)))
        found.append(FaultPlan(kind, at_s, duration_s(), engine, draw.randrange(2)))
    return found


def _with_faults(plan: EpisodePlan, faults: list[FaultPlan]) -> EpisodePlan:
    if plan.fleet.is_calm:
        return plan
    return replace(plan, faults=tuple(sorted((*plan.faults, *faults), key=lambda fault: fault.at_s)))


def _again(draw: random.Random, plan: EpisodePlan) -> EpisodePlan:
    """Requests that come again under the same id, and engines that come back under the same id meanwhile."""
    if plan.fleet.is_calm:
        return plan
    requests = tuple(
        replace(request, again=draw.choice(("abort", "leased", "end"))) if draw.random() < 0.6 else request
        for request in plan.requests
    )
    crashes = [
        FaultPlan("crash", aim.at_s + aim.router_s + draw.random() * 0.5, draw.choice((0.01, 0.2)), aim.prefill, 0)
        for aim in requests
        if aim.again and draw.random() < 0.3
    ]
    return _with_faults(
        replace(plan, requests=requests), [one for one in crashes if one.at_s < plan.fleet.faults_end_s]
    )


def _samples(draw: random.Random, plan: EpisodePlan) -> EpisodePlan:
    """End requests as vLLM does, and let further turns add few tokens or none."""
    requests = tuple(replace(request, turn_tokens=draw.choice((-1, 0, 1, 8))) for request in plan.requests)
    return replace(plan, fleet=replace(plan.fleet, ends_at_sample=True), requests=requests)


PARTS: tuple[tuple[Part, float], ...] = (
    (_samples, 0.5),
    (_kinds, 0.3),
    (_prefixes, 0.35),
    (_mirrors, 0.15),
    (_again, 0.15),
    (_resets, 0.15),
    (_sleeps, 0.15),
)
"""Each part, and the share of seeds that have it."""

PARTS_OF_STREAMS: tuple[tuple[Part, float], ...] = (
    (_samples, 0.5),
    (_kinds, 0.4),
    (_prefixes, 0.25),
    (_mirrors, 0.1),
    (_resets, 0.1),
    (_sleeps, 0.1),
)
"""Those that mean something for prompts that are read while they are computed, and the share of seeds that have them."""
