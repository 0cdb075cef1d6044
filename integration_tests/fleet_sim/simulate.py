"""Replay a seed or a saved plan, or play many seeds.

Examples:
    python integration_tests/fleet_sim/simulate.py 162
    python integration_tests/fleet_sim/simulate.py 0 --count 20000
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from draw import draw_plan
from episode import Outcome, play
from many import play_many
from plan import from_json


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", nargs="?", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="play so many seeds and print the figures")
    parser.add_argument("--plan", type=Path, help="play a saved plan instead of a seed")
    given = parser.parse_args()
    if given.count > 1:
        figures = play_many(range(given.seed, given.seed + given.count))
        for seed, kind, text in figures.failures:
            print(f"seed {seed}: {kind}: {text}")
        print("\n".join(figures.lines()))
        return int(bool(figures.failures))
    outcome = play(from_json(given.plan.read_text()) if given.plan else draw_plan(given.seed))
    print_timeline(outcome)
    return int(bool(outcome.violations))


def print_timeline(outcome: Outcome) -> None:
    """Print an episode line by line."""
    for note in outcome.notes:
        arrow = f" -> {note.target} at {note.until_s:.4f}" if note.target else ""
        print(f"{note.at_s:9.4f} {note.lane:7} {note.text}{arrow}")
    print(f"log {outcome.log_hash}, {outcome.events} events")


if __name__ == "__main__":
    sys.exit(main())
