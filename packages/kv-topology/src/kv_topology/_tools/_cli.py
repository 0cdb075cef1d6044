"""Command line: `kv-topology plan SPEC` for dry runs without an engine, `kv-topology prove` for the byte oracle.

Exit codes: 0 done; 1 a proof failed; 2 bad usage or a specification that is no specification; 3 no plan exists.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kv_topology._errors import InvalidGeometry, TopologyError
from kv_topology._tools._engine_values import KV_LAYOUTS
from kv_topology._tools._picture import draw
from kv_topology._tools._report import report_json, report_text
from kv_topology._tools._spec import load_spec
from kv_topology._tools._survey import survey

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    layouts = "\n".join(f"  {name:<12} {what}" for name, what in KV_LAYOUTS.items())
    parser = argparse.ArgumentParser(
        prog="kv-topology",
        description="Which bytes of which peer rank land where.",
        epilog=f"layouts:\n{layouts}\n\nexit codes: 0 done, 1 a proof failed, 2 bad usage or specification, 3 no plan",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="plan a transfer between two engines from a specification, without any")
    plan.add_argument("spec", type=Path, help="TOML or JSON file: model, consumer, producer, link")
    plan.add_argument("--json", action="store_true", help="print the plans with all slices as JSON")
    plan.add_argument("--svg", type=Path, metavar="FILE", help="also draw who reads what from whom")
    plan.add_argument("--rank", type=int, metavar="R", help="only the consumer rank with this tp rank")
    prove = commands.add_parser(
        "prove", help="execute the plans of listed pairs as plain copies and compare every byte"
    )
    prove.add_argument("families", nargs="*", help="what to vary (default: everything)")
    prove.add_argument("--step", type=int, default=1, metavar="N", help="prove every N-th pair only")
    prove.add_argument("--json", action="store_true", help="print the counts as JSON")
    return parser


def _plan(options: argparse.Namespace) -> int:
    try:
        run = load_spec(options.spec)
    except (OSError, ValueError) as error:
        print(f"kv-topology: cannot read the specification: {error}", file=sys.stderr)
        return 2
    except InvalidGeometry as error:
        print(f"kv-topology: {error}", file=sys.stderr)
        return 2
    if options.rank is not None and not 0 <= options.rank < run.consumer.tp:
        print(f"kv-topology: --rank {options.rank} is no rank of a consumer with tp {run.consumer.tp}", file=sys.stderr)
        return 2
    try:
        found = survey(run)
    except InvalidGeometry as error:
        print(f"kv-topology: the specification makes no engine ({error.code}): {error}", file=sys.stderr)
        return 2
    except TopologyError as error:
        print(f"kv-topology: no plan ({error.code}): {error}", file=sys.stderr)
        return 3
    if options.svg is not None:
        try:
            options.svg.write_text(draw(found, only=options.rank), encoding="utf-8")
        except OSError as error:
            print(f"kv-topology: cannot write the picture: {error}", file=sys.stderr)
            return 2
    if options.json:
        print(json.dumps(report_json(found, only=options.rank), indent=1))
    else:
        print(report_text(found, only=options.rank))
    return 0


def _prove(options: argparse.Namespace) -> int:
    from kv_topology._tools._proof_cases import FAMILIES, run_proofs
    from kv_topology.testing import OracleFailure

    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown or options.step < 1:
        known = ", ".join(FAMILIES)
        print(f"kv-topology: families are {known}; --step is at least 1", file=sys.stderr)
        return 2
    counts: dict[str, dict[str, int]] = {}
    for name in options.families or FAMILIES:
        try:
            pairs, proof = run_proofs((name,), step=options.step)[name]
        except OracleFailure as error:
            print(f"kv-topology: a proof of {name} failed: {error}", file=sys.stderr)
            return 1
        counts[name] = {"pairs": pairs, "plans": proof.plans, "copies": proof.copies, "bytes": proof.bytes_proved}
        if not options.json:
            print(f"{name:<14} {pairs:>6} pairs {proof.plans:>7} plans {proof.bytes_proved:>11} bytes", flush=True)
    _print_total(counts, as_json=options.json)
    return 0


def _print_total(counts: dict[str, dict[str, int]], *, as_json: bool) -> None:
    total = {key: sum(count[key] for count in counts.values()) for key in ("pairs", "plans", "copies", "bytes")}
    if as_json:
        print(json.dumps({**counts, "total": total}))
    else:
        print(f"proved {total['pairs']} pairs of engines, {total['plans']} plans, {total['bytes']} bytes: no mismatch")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code = _plan(options) if options.command == "plan" else _prove(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
