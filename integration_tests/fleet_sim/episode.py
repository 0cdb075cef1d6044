"""An episode: a plan is played, faults end, everything must come to rest."""

from __future__ import annotations

import logging
import os
import re
from contextlib import ExitStack
from typing import final
from unittest.mock import patch

from checks import leftovers
from faults import Faults
from fleet import Fleet
from plan import EpisodePlan, RequestPlan
from planted import Fault
from resources import kept_requests
from router import Router
from seams import simulated
from wire import SimHub, SimPort, SimRouter
from world import World

import vllm_adapter.wiring
from kv_scheduler_state.errors import DuplicateRequest

_LOOK_S = 0.25
_WALKED = 10
"""Every so many seeds all objects of the engines are walked at the end, which takes longer than most episodes."""
_KEEPS_LEASES = frozenset(("pause", "starve", "blip"))
"""Faults of calm fleets by which no lease may end unread."""
_UNREAD = re.compile(r"-p\d+: its lease ended before it was read \(last heartbeat")
"""A prefill's lease that a reader had asked for. One of decode's is for a next turn, which need not come."""
_ROUNDS = 6
_PAUSE_S = 2.5
"""Time between two attempts. A failed engine is asked again in the background after 5 s at most, so the third round meets it."""


@final
class _LogLines(logging.Handler):
    """Writes production's warnings into the log; an exception that production reports is a broken promise."""

    def __init__(self, world: World, plan: EpisodePlan) -> None:
        super().__init__(logging.WARNING)
        self._sends_ids_again = any(request.again for request in plan.requests)
        self._world = world
        self._is_calm = plan.fleet.is_calm and {fault.kind for fault in plan.faults} <= _KEEPS_LEASES

    def emit(self, record: logging.LogRecord) -> None:
        lane = self._world.current.name if self._world.current is not None else "log"
        text = record.getMessage()
        self._world.note(lane, f"log: {text.splitlines()[0][:160]}")
        if self._is_calm and _UNREAD.search(text):
            self._world.violated("needless-expiry", f"{lane}: {text}")
        error = record.exc_info[1] if record.exc_info is not None else None
        if isinstance(error, DuplicateRequest) and self._sends_ids_again:
            self._world.counts["refused-duplicates"] += 1
        elif isinstance(error, RuntimeError) and "copy between device" in str(error):
            self._world.counts["failed-copies"] += 1
        elif error is not None:
            self._world.violated("exception", f"{lane}: {text[:200]}: {error!r}")


def play(plan: EpisodePlan, fault: Fault | None = None) -> World:
    """Play a plan to its end, with a planted fault or none; return its world."""
    fleet = Fleet(plan)
    world = fleet.world
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"SIM_FLEET_SECRET": "0123456789abcdef0123456789abcdef"}))
        stack.enter_context(patch.object(vllm_adapter.wiring, "use_allowed_cores", lambda: None))
        _take_logs(stack, world, plan)
        if fault is not None:
            stack.enter_context(fault.planted())
        fleet.threads = stack.enter_context(
            simulated(
                fleet, hub=lambda _: SimHub(fleet), port=lambda endpoint: SimPort(fleet, endpoint), router=SimRouter
            )
        )
        _run(fleet)
    return world


def _take_logs(stack: ExitStack, world: World, plan: EpisodePlan) -> None:
    handler = _LogLines(world, plan)
    for name in ("vllm.vllm_adapter", "kv_handshake", "kv_nixl_agent"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        stack.enter_context(patch.object(logger, "propagate", False))


def _run(fleet: Fleet) -> None:
    plan, world = fleet.plan, fleet.world
    fleet.router = Router(fleet)
    for slot in range(len(plan.fleet.engines)):
        fleet.start(slot)
    for request in plan.requests:
        fleet.router.start(request)
    faults = Faults(fleet)
    for fault in plan.faults:
        faults.plant(fault)
    world.run(plan.fleet.faults_end_s)
    if world.violations:
        return
    faults.heal()
    settle(fleet)
    serve_again(fleet, bound_s(plan))
    settle(fleet)
    if plan.seed % _WALKED == 0 and not world.violations:
        for engine in fleet.living():
            for text in kept_requests(engine):
                world.violated("request-kept", f"{engine.name}, at rest: {text}")


def settle(fleet: Fleet) -> None:
    """Wait until everything is at rest, at most as long as everything may take."""
    world, began_s = fleet.world, fleet.world.now_s
    until_s = began_s + bound_s(fleet.plan)
    while not world.violations:
        world.run(min(world.now_s + _LOOK_S, until_s))
        if world.violations:
            return
        left = leftovers(fleet)
        if not left:
            return
        if world.now_s >= until_s:
            for kind, text in left[:1]:
                world.violated(kind, f"{text}, {until_s - began_s:.0f} s after the last fault or request")
            return


def serve_again(fleet: Fleet, bound_s: float) -> None:
    """Hand one short prompt over per pair of engines, until each has had a read accepted.

    Args:
        fleet: A fleet at rest, without faults.
        bound_s: Longest time that a round may take.
    """
    world, engines = fleet.world, fleet.plan.fleet.engines
    prefills = [slot for slot, engine in enumerate(engines) if engine.role == "prefill"]
    decodes = [slot for slot, engine in enumerate(engines) if engine.role == "decode"]
    missing = [(prefill, decode) for prefill in prefills for decode in decodes]
    began_s = world.now_s
    for number in range(_ROUNDS):
        if world.violations:
            return
        names = {pair: f"again{number}.{pair[0]}.{pair[1]}" for pair in missing}
        for (prefill, decode), name in names.items():
            fleet.router.start(RequestPlan(name, 0.0, prefill, decode, tokens=6, new_tokens=1, router_s=0.001))
        world.run(world.now_s + bound_s, lambda: not fleet.router.open_names())
        missing = [pair for pair, name in names.items() if f"{name}-d1" not in world.accepted]
        if not missing:
            return
        world.run(world.now_s + _PAUSE_S)
    for prefill, decode in missing[:1]:
        world.violated(
            "service-not-restored",
            f"{fleet.lane(decode)} has read nothing from {fleet.lane(prefill)} in {_ROUNDS} attempts, "
            f"{world.now_s - began_s:.0f} s after everything was at rest",
        )


def bound_s(plan: EpisodePlan) -> float:
    """Return how long after the last fault the last request may end and the last block may come back."""
    fleet = plan.fleet
    latest_s = max([request.at_s + 3 * request.router_s * request.turns for request in plan.requests], default=0.0)
    one_s = fleet.lease_s + 2 * fleet.read_timeout_s + 6 * fleet.handshake_timeout_s + fleet.patience_s + fleet.notice_s
    return (
        max(0.0, latest_s - fleet.faults_end_s) + 20 + 3 * one_s + (fleet.readback_s if fleet.is_bidirectional else 0.0)
    )
