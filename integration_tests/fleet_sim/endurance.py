"""Many rounds of the same traffic in one world, and the sizes of everything that is kept after each round.

A round holds good reads, aborts on both sides, changed tickets, notifications of strangers and dead addresses, and begins with
the death of an engine of one role, which comes back under its own id or a new one. After it the fleet is at rest. Memories that
have a bound are lowered to a few entries, so whatever goes on growing in the engines that live on grows with every request, or
with every engine that ever was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from episode import settle, start
from faults import Faults
from plan import FaultPlan, RequestPlan
from resources import contents_of
from router import DAMAGES

import kv_handshake._client
import kv_nixl_agent.memory.peers
import kv_nixl_agent.statistics
import kv_scheduler_state._handovers
import kv_scheduler_state._hosts
import kv_scheduler_state._ticket_reader
import vllm_adapter.observe.hand_overs
from kv_handshake._pacing import FailureMemory
from kv_scheduler_state import LeaseTable
from vllm_adapter.observe.hand_overs import HandOverLog

if TYPE_CHECKING:
    from fleet import Fleet
    from plan import EpisodePlan

__all__ = ["endure", "growing", "roomy", "small_memories"]

_REQUESTS = 8
_TEXT_SLACK = 64
"""Characters by which texts may differ: names of engines get longer with their numbers."""
_KEPT = 8
"""Entries to which every memory that has a bound is lowered, so that it is full long before the run ends."""


@contextmanager
def small_memories() -> Iterator[None]:
    """Lower the bounds of everything that production remembers on purpose; nothing else may grow at all."""
    defaults: list[tuple[Any, str]] = [(LeaseTable, "remembered_ends"), (FailureMemory, "capacity")]
    constants: list[tuple[ModuleType, str, int]] = [
        (kv_scheduler_state._ticket_reader, "_MAX_PEERS", _KEPT),
        (kv_scheduler_state._hosts, "_MAX_REMEMBERED", _KEPT),
        (kv_scheduler_state._handovers, "_REMEMBERED", _KEPT),
        (kv_handshake._client, "_BACKGROUND_SHARE", 512 // _KEPT),
        (kv_nixl_agent.memory.peers, "_MAX_WAITING_AGENTS", 2),
        (kv_nixl_agent.statistics, "_WINDOW", _KEPT),
        (vllm_adapter.observe.hand_overs, "_MOST_STAGES", 1),
    ]
    with ExitStack() as stack:
        for owner, name in defaults:
            stack.enter_context(patch.dict(owner.__init__.__kwdefaults__, {name: _KEPT}))
        stack.enter_context(patch.object(HandOverLog.__init__, "__defaults__", (_KEPT,)))
        for module, name, value in constants:
            stack.enter_context(patch.object(module, name, value))
        yield


def roomy(plan: EpisodePlan) -> EpisodePlan:
    """Return a plan whose fleet never runs out of blocks, slots or quota, so that every round is alike."""
    fleet = plan.fleet
    engines = tuple(replace(engine, blocks=400) for engine in fleet.engines)
    limits: dict[str, Any] = {"fence_slots": 64, "max_leases": 0, "max_leased_blocks": 0, "is_calm": False}
    return replace(plan, fleet=replace(fleet, engines=engines, lease_s=1.0, readback_s=1.0, **limits))


def endure(fleet: Fleet, rounds: int, restarted: str) -> list[Counter[str]]:
    """Play so many rounds, with a restart of an engine of one role in each; return what the others keep after each round."""
    start(fleet)
    faults = Faults(fleet)
    found: list[Counter[str]] = []
    for number in range(rounds):
        _restart(fleet, restarted, number)
        for request in _requests(fleet, number):
            fleet.router.start(request)
        for slot in range(len(fleet.plan.fleet.engines)):
            fleet.world.after(0.05, partial(faults.forged, FaultPlan("forged", 0.0, 0.0, slot)))
        fleet.world.run(fleet.world.now_s + 60.0, lambda: not fleet.router.open_names())
        settle(fleet)
        if fleet.world.violations:
            break
        found.append(sum((_sizes(engine) for engine in fleet.living() if engine.plan.role != restarted), Counter()))
    return found


def _restart(fleet: Fleet, role: str, number: int) -> None:
    slots = [slot for slot, engine in enumerate(fleet.plan.fleet.engines) if engine.role == role]
    slot = slots[number % len(slots)]
    fleet.crash(slot)
    fleet.start(slot, is_renamed=number % 3 != 0)


def _requests(fleet: Fleet, number: int) -> list[RequestPlan]:
    """Return the requests of a round: two good ones per pair of roles, two aborted, the rest damaged in turn."""
    slots = range(len(fleet.plan.fleet.engines))
    prefills = [slot for slot in slots if fleet.plan.fleet.engines[slot].role == "prefill"]
    decodes = [slot for slot in slots if fleet.plan.fleet.engines[slot].role == "decode"]
    damages = ("", "", "", "", "engine", "port", DAMAGES[number % len(DAMAGES)], "generation")
    aborts = ("", "", "prefill", "decode", "", "", "", "")
    return [
        RequestPlan(
            f"r{number}.{place}",
            0.02 * place,
            prefills[place % len(prefills)],
            decodes[(place // 2) % len(decodes)],
            tokens=12 + place,
            new_tokens=1,
            router_s=0.001,
            abort=aborts[place],
            abort_s=0.01,
            damage=damages[place],
        )
        for place in range(_REQUESTS)
    ]


def _sizes(engine: Any) -> Counter[str]:
    """Return the sizes of an engine's containers, and what its connections and NIXL hold."""
    sizes = contents_of(engine).sizes
    for worker in engine.workers:
        registration = worker._registration
        port = registration.agent._loop.agent._port
        sizes["NIXL: handles"] += len(port.handles)
        sizes["NIXL: prepared lists"] += port.list_count
        sizes["NIXL: loaded agents"] += len(port.inner._peers)
        sizes["NIXL: registrations"] += len(port.inner._regions)
        sizes["ZeroMQ: connections"] += registration.handshakes._loop._hub.open_count
    return sizes


def growing(found: list[Counter[str]]) -> list[str]:
    """Return, in words, what is larger at every rest of the last third than at any of the second.

    Example: `Peers.known` is 3, 4, 4 in the second third and 9, 10, 11 in the last: it grows. 4, 8, 4 and 8, 4, 8 does not.
    """
    problems: list[str] = []
    third = len(found) // 3
    for name in sorted({name for sizes in found for name in sizes}):
        before, after = ([sizes[name] for sizes in part] for part in (found[third : 2 * third], found[2 * third :]))
        if min(after) > max(before) + (_TEXT_SLACK if name.endswith(" text") else 0):
            problems.append(f"{name} grows: {before}, then {after}")
    return problems
