"""Prove the listed pairs of engines: `python -m byte_oracle windows tp --step 50`. Exits with 1 if a proof fails."""

from __future__ import annotations

import argparse
import json

from byte_oracle.cases import FAMILIES, run_proofs
from byte_oracle.oracle import OracleFailure


def main() -> None:
    """Run the proofs and print how many pairs, plans and bytes of each family were proved."""
    parser = argparse.ArgumentParser(prog="byte_oracle", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--step", type=int, default=1, help="prove every N-th pair only")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args()
    chosen = options.families or list(FAMILIES)
    if options.step < 1 or not set(chosen) <= set(FAMILIES):
        parser.error(f"give families of {', '.join(FAMILIES)}, and a --step of 1 or more")
    counts: dict[str, dict[str, int]] = {}
    for name in chosen:
        try:
            pairs, proof = run_proofs((name,), step=options.step)[name]
        except OracleFailure as error:
            raise SystemExit(f"a proof of {name} failed: {error}") from error
        counts[name] = {"pairs": pairs, "plans": proof.plans, "copies": proof.copies, "bytes": proof.bytes_proved}
        if not options.json:
            print(f"{name:<14} {pairs:>6} pairs {proof.plans:>7} plans {proof.bytes_proved:>11} bytes", flush=True)
    total = {key: sum(count[key] for count in counts.values()) for key in ("pairs", "plans", "copies", "bytes")}
    if options.json:
        print(json.dumps({**counts, "total": total}))
    else:
        print(f"proved {total['pairs']} pairs of engines, {total['plans']} plans, {total['bytes']} bytes: no mismatch")


if __name__ == "__main__":
    main()
