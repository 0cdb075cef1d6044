"""After the faults: every decode engine reads from every prefill engine again, within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plan import RequestPlan

if TYPE_CHECKING:
    from fleet import Fleet

__all__ = ["serve_again"]

_ROUNDS = 6
_PAUSE_S = 2.5
"""Time between two attempts. A failed engine is asked again in the background after 5 s at most, so the third round meets it."""


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
