"""Find each planted bug by seed, shrink its plan and record it for the tests.

Examples:
    python integration_tests/fleet_sim/record.py
    python integration_tests/fleet_sim/record.py fence-skipped lease-not-renewed --seeds 500
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bugs import BUGS
from bugs_of_streams import STREAM_BUGS
from episode import Outcome, play
from many import DRAWS
from plan import EpisodePlan
from shrink import shrink

RECORDED = Path(__file__).parent / "planted"


def load() -> dict[str, Any]:
    """Return what is recorded, by bug."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))}


def save(name: str, seed: int, outcome: Outcome) -> None:
    """Record a bug's plan."""
    found = {"seed": seed, "kind": outcome.violations[0].kind, "plan": dataclasses.asdict(outcome.plan)}
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.json").write_text(json.dumps(found) + "\n")


def _is_hostile(plan: EpisodePlan) -> bool:
    return any(request.damage == "foreign" for request in plan.requests)


def _is_short_of_slots(plan: EpisodePlan) -> bool:
    return plan.fleet.is_calm and plan.fleet.fence_slots == 2


def _is_many_ranked(plan: EpisodePlan) -> bool:
    return plan.fleet.is_calm and [engine.tp for engine in plan.fleet.engines] == [2, 1]


def _has_siblings(plan: EpisodePlan) -> bool:
    return any(request.readers > 1 for request in plan.requests)


def _is_slow(plan: EpisodePlan) -> bool:
    return plan.fleet.is_calm and plan.fleet.bytes_per_s < 1e3 and not plan.faults


def _stalls(plan: EpisodePlan) -> bool:
    """Reads that end early while their bytes are still on the way."""
    long = [fault for fault in plan.faults if fault.kind in {"cut", "slow", "stop"} and fault.duration_s > 0.5]
    return plan.fleet.read_timeout_s < 1 and plan.fleet.blocks_reads_of_stopped and bool(long)


def _is_short_of_slots_under_reads(plan: EpisodePlan) -> bool:
    return plan.fleet.fence_slots <= 2 and plan.fleet.read_timeout_s > 4 and not plan.fleet.is_calm


def _disconnects(plan: EpisodePlan) -> bool:
    """Connections that end although both processes live."""
    cuts = [fault for fault in plan.faults if fault.kind == "cut" and fault.duration_s > plan.fleet.patience_s]
    return bool(cuts)


def _preempts(plan: EpisodePlan) -> bool:
    return any(fault.kind == "preempt" for fault in plan.faults)


HINTS: dict[str, Callable[[EpisodePlan], bool]] = {
    "fence-stale-generation": _is_short_of_slots_under_reads,
    "fence-generations-repeat": _is_short_of_slots_under_reads,
    "revocation-not-ordered": _is_short_of_slots_under_reads,
    "engine-in-trouble-kept": _disconnects,
    "queue-cap-shared": lambda plan: len(plan.faults) == 1 and plan.fleet.max_inflight_bytes > 0,
    "queue-last-first": lambda plan: (
        plan.fleet.is_calm and plan.fleet.bytes_per_s < 3e3 and plan.fleet.max_inflight_bytes > 0
    ),
    "handshake-waits-for-refused": lambda plan: len(plan.faults) == 1 and plan.faults[0].kind == "crash",
    "ticket-without-fence-read": lambda plan: any(one.damage == "no-fence" for one in plan.requests),
    "read-never-retried": lambda plan: any(fault.kind == "blip" for fault in plan.faults),
    "siblings-know-nothing": lambda plan: plan.fleet.is_calm and _has_siblings(plan),
    "peer-unloaded-alive": lambda plan: plan.fleet.engine_ttl_s > 0,
    "notification-nonce-ignored": lambda plan: plan.fleet.is_calm and any(one.kind == "forged" for one in plan.faults),
    "pause-ends-leases": lambda plan: plan.fleet.is_calm and any(fault.kind == "pause" for fault in plan.faults),
    "queue-count-leaks": lambda plan: plan.fleet.max_inflight_bytes > 0 and bool(plan.faults),
    "fence-slot-returned-early": _is_short_of_slots,
    "fence-scratch-shared": _is_many_ranked,
    "ticket-not-bound": _is_hostile,
    "lease-one-reader-is-all": lambda plan: plan.fleet.is_calm and max(one.tp for one in plan.fleet.engines[1:]) > 1,
    "lease-quota-ignored": lambda plan: plan.fleet.max_leases > 0,
    "sibling-never-woken": _has_siblings,
    "lease-not-renewed": _is_slow,
    "heartbeats-stop": _is_slow,
    "heartbeats-for-one-only": _is_slow,
    "quarantine-denied": _stalls,
    "quarantine-released-early": _stalls,
    "quarantine-never-ends": _stalls,
    "cancelled-read-forgotten": _stalls,
    "stream-generation-kept": _preempts,
    "stream-no-final-fence": _preempts,
    "stream-void-after-forward": _preempts,
    "stream-state-early": lambda plan: plan.fleet.has_state,
}
"""Seeds to look at first: a bug is found sooner, and by no other seeds."""


def find(name: str, seeds: int, within_s: float) -> tuple[int, Outcome] | None:
    """Return a seed that finds a bug, and its episode."""
    until_s = time.monotonic() + within_s
    hint = HINTS.get(name, lambda _: True)
    draw = DRAWS["streams" if name in STREAM_BUGS else "plain"]
    for seed in sorted(range(seeds), key=lambda each: not hint(draw(each))):
        outcome = play(draw(seed), BUGS[name])
        if outcome.violations:
            return seed, outcome
        if time.monotonic() > until_s:
            break
    return None


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bugs", nargs="*", help="bugs to record; all without")
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--within", type=float, default=1e9, help="seconds to look for each")
    parser.add_argument("--shrink", type=float, default=10.0, help="seconds to shrink each")
    given = parser.parse_args()
    missed = 0
    for name in given.bugs or BUGS:
        found = find(name, given.seeds, given.within)
        if found is None:
            missed += 1
            print(f"{name}: not found", flush=True)
            continue
        seed, outcome = found
        small = shrink(outcome.plan, BUGS[name], within_s=given.shrink)
        save(name, seed, small)
        size = f"{len(small.plan.requests)} requests, {len(small.plan.faults)} faults"
        print(f"{name}: seed {seed}, {small.violations[0].kind}, {size}", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
