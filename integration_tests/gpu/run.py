"""Run the checks of the port on VRAM and write JSON evidence.

    python integration_tests/gpu/run.py [--output FILE]

Exit code 0: all passed on a GPU. 1: something failed. 77: there is no GPU, nothing was shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
from evidence import device_facts, make_evidence, render_page, write_evidence
from stages import CHECKS, PAGE_BYTES, PAGES, PLACES, make_stage

NO_GPU = 77


def bandwidth_of(stage):
    """Return the best of ten reads of all pages in random order, GB/s."""
    stage.connect()
    ids = np.random.default_rng(0).permutation(PAGES)
    best_s = 1e9
    for number in range(10):
        began_s = time.perf_counter()
        result = stage.read(f"b{number}", ids, ids)
        best_s = min(best_s, time.perf_counter() - began_s)
        assert result.outcome == "done", result
    return PAGES * PAGE_BYTES / best_s / 1e9


def run_place(torch, place, results, bandwidth):
    """Run every check and the bandwidth of one direction."""
    for body in (*CHECKS, bandwidth_of):
        name = f"{place}:{body.__name__}"
        try:
            stage, close = make_stage(torch, place)
            try:
                measured = body(stage)
            finally:
                close()
            results[name] = "passed"
            if body is bandwidth_of:
                bandwidth[place] = round(measured, 2)
        except Exception as error:
            results[name] = f"failed: {type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"{name}: {results[name]}", flush=True)


def outcomes_of(report):
    """Return the outcome of every test in a JUnit report; a report that is not there is a part that did not run."""
    part = report.stem
    if not report.exists():
        return {part: "not run"}
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        failure = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        outcome = "passed"
        if failure is not None:
            outcome = f"failed: {failure.get('message', '')}"
        elif skip is not None:
            outcome = f"not run: {skip.get('message', '')}"
        found[f"{part}:{case.get('name')}"] = outcome
    return found or {part: "not run"}


def figures_of(path):
    """Return what tests noted as figures, by test and name."""
    if path is None or not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return {f"{line['test']}: {line['name']}": line["value"] for line in lines}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="gpu-evidence.json", help="file for the evidence (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="PAGE", help="also write the evidence as this Markdown page")
    parser.add_argument(
        "--report",
        type=Path,
        action="append",
        default=[],
        help="JUnit report of another part, whose outcomes count too",
    )
    parser.add_argument("--figures", type=Path, help="figures that the other parts noted, a line of JSON each")
    parser.add_argument("--control", action="store_true", help="run the DRAM control alone, GPU or not; never green")
    options = parser.parse_args(arguments)
    results: dict[str, str] = {}
    bandwidth: dict[str, float] = {}
    facts, implementation = device_facts(), "not started"
    if options.control:
        facts = {**facts, "reason": "only the DRAM control was run"}
    if "reason" not in facts or options.control:
        import torch

        from kv_nixl_agent import open_nixl

        probe = open_nixl("gpu-probe", [("UCX", {})])
        implementation = probe.implementation
        probe.close()
        for place in ("dram-to-dram",) if options.control else PLACES:
            run_place(torch, place, results, bandwidth)
    for report in options.report:
        results |= outcomes_of(report)
    evidence = make_evidence(facts, implementation, results, bandwidth, figures_of(options.figures))
    write_evidence(options.output, evidence)
    if options.record is not None:
        options.record.write_text(render_page(evidence))
    if "reason" in facts:
        print(f"NOT RUN, NOT GREEN: {facts['reason']}", file=sys.stderr)
        return NO_GPU
    return 0 if evidence["is_green"] else 1


if __name__ == "__main__":
    sys.exit(main())
