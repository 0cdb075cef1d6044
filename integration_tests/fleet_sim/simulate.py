"""Replay a seed, or play many seeds.

Examples:
    python integration_tests/fleet_sim/simulate.py 162
    python integration_tests/fleet_sim/simulate.py 20 --bug lease-not-renewed
    python integration_tests/fleet_sim/simulate.py 0 --count 20000
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "fakes"))

from episode import play
from many import DRAWS, play_many
from planted import FAULTS


def main() -> int:
    """Run from the command line."""
    faults = {fault.name: fault for fault in FAULTS if fault.found_by != "oracle"}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", nargs="?", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="play so many seeds and print the figures")
    parser.add_argument("--bug", choices=sorted(faults), help="plant a fault")
    parser.add_argument(
        "--streams", action="store_true", help="seeds of fleets whose prompts are read while they are computed"
    )
    given = parser.parse_args()
    kind = "streams" if given.streams else "plain"
    if given.count > 1:
        figures = play_many(range(given.seed, given.seed + given.count), kind)
        print(figures.replays(" --streams" * given.streams))
        print(figures.text())
        return int(bool(figures.failures))
    fault = faults[given.bug] if given.bug else None
    world = play(DRAWS[kind](given.seed), fault)
    for note in world.notes:
        arrow = f" -> {note.target} at {note.until_s:.4f}" if note.target else ""
        print(f"{note.at_s:9.4f} {note.lane:7} {note.text}{arrow}")
    print(f"log {world.log_hash()}, {world.events} events")
    return int(bool(world.violations))


if __name__ == "__main__":
    sys.exit(main())
