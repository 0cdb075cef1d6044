"""Write the page of a GPU run from the reports of its parts.

    python integration_tests/gpu/record.py --report FILE... --figures FILE --record PAGE

Exit code 0: all passed on a GPU. 1: something failed or did not run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def device_facts():
    """Return name, driver and count of the GPUs, or why there are none."""
    try:
        import torch
    except ImportError as error:
        return {"reason": f"torch cannot be imported: {error}"}
    if not torch.cuda.is_available():
        return {"reason": "torch sees no CUDA device"}
    driver = Path("/proc/driver/nvidia/version")
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("UCX_")]
    return {
        "name": torch.cuda.get_device_name(0),
        "count": torch.cuda.device_count(),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "UCX settings": ", ".join(settings) or "none",
        **{name: _version(name) for name in ("vllm", "vllm-adapter", "nixl")},
    }


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def outcomes_of(report):
    """Return the outcome of every test in a JUnit report; a report that is not there is a part that did not run."""
    part = report.stem
    if not report.exists():
        return {part: "not run"}
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome = "passed"
        for kind, word in (("failure", "failed"), ("error", "failed"), ("skipped", "not run")):
            if (ended := case.find(kind)) is not None:
                outcome = f"{word}: {ended.get('message', '')}"
        found[f"{part}:{case.get('name')}"] = outcome
    return found or {part: "not run"}


def figures_of(path):
    """Return what tests noted as figures, by test and name."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {f"{line['test']}: {line['name']}": line["value"] for line in lines}


def verdict_of(facts, results):
    """Return the word at the head of the page: a part that did not run is never passed over."""
    if "reason" in facts:
        return "Not run"
    if results and set(results.values()) == {"passed"}:
        return "Passed"
    is_incomplete = all(one == "passed" or one.startswith("not run") for one in results.values())
    return "INCOMPLETE" if is_incomplete else "FAILED"


def page_of(facts, results, figures):
    """Return the page: what it ran on, a row per part that passed, a row per check that did not, the figures."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    taken_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    passed = Counter(name.partition(":")[0] for name, outcome in results.items() if outcome == "passed")
    others = {name: outcome for name, outcome in results.items() if outcome != "passed"}
    checks = {**{f"{part}: {count} checks": "passed" for part, count in sorted(passed.items())}, **others}
    lines = [
        "# Evidence of the GPU stage",
        "",
        "Written by `python3 tools/dev.py test gpu --record`; not to be edited by hand.",
        "",
        f"**{verdict_of(facts, results)}** at {taken_at}, commit {commit.stdout.strip() or 'unknown'}.",
        "",
    ]
    for head, rows in (("what", facts), ("check", checks), ("figure of a test", figures)):
        cells = (f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
        lines += [f"| {head} | value |", "|---|---|", *cells, ""]
    return "\n".join(lines)


def _cell(text):
    """Return a text that stays in its cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, action="append", default=[], help="JUnit report of a part")
    parser.add_argument("--figures", type=Path, required=True, help="figures that the parts noted, a line of JSON each")
    parser.add_argument("--record", type=Path, required=True, metavar="PAGE", help="the page to write")
    options = parser.parse_args()
    facts, results = device_facts(), {}
    for report in options.report:
        results |= outcomes_of(report)
    options.record.write_text(page_of(facts, results, figures_of(options.figures)))
    return int(verdict_of(facts, results) != "Passed")


if __name__ == "__main__":
    sys.exit(main())
