"""JSON evidence of a GPU run: what ran, where, with which outcome and how fast."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
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
    return {
        "name": torch.cuda.get_device_name(0),
        "count": torch.cuda.device_count(),
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "vllm": _version("vllm"),
        "vllm-adapter": _version("vllm-adapter"),
        "UCX settings": _ucx_settings(),
    }


def _ucx_settings():
    """Return the settings of UCX that the stage ran under, `UCX_TLS=tcp, ...`, or that there are none."""
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("UCX_")]
    return ", ".join(found) or "none"


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver():
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0] if path.exists() else "unknown"


def commit():
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def make_evidence(facts, implementation, results, bandwidth, figures=None):
    """Return the evidence; it is green only if a GPU was there, something ran, and all of it passed."""
    is_green = "reason" not in facts and bool(results) and all(outcome == "passed" for outcome in results.values())
    return {
        "format": 1,
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "device": facts,
        "nixl": implementation,
        "python": platform.python_version(),
        "results": dict(results),
        "bandwidth_gb_s": dict(bandwidth),
        "figures": dict(figures or {}),
        "is_green": is_green,
    }


def render_page(evidence):
    """Return the evidence as the page that `dev.py test gpu --record` writes."""
    device = evidence["device"]
    lines = [
        "# Evidence of the GPU stage",
        "",
        "Written by `python3 tools/dev.py test gpu --record`; not to be edited by hand.",
        "",
    ]
    if "reason" in device:
        return "\n".join([*lines, f"**Not run**: {device['reason']}. Nothing is shown.", ""])
    lines += [
        f"**{_verdict(evidence)}** at {evidence['taken_at']}, commit {evidence['commit']}.",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in sorted(device.items())),
        f"| nixl | {evidence['nixl']} |",
        f"| python | {evidence['python']} |",
        "",
        "| check | outcome |",
        "|---|---|",
        *_outcomes(evidence["results"]),
        "",
        "| direction | GB/s, best of ten |",
        "|---|---|",
        *(f"| {place} | {figure} |" for place, figure in sorted(evidence["bandwidth_gb_s"].items())),
        "",
    ]
    if evidence["figures"]:
        rows = (f"| {_cell(name)} | {_cell(value)} |" for name, value in sorted(evidence["figures"].items()))
        lines += ["| figure of a test | value |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _outcomes(results):
    """Return a row per group of checks that passed, and one per check that did not."""
    passed = Counter(name.partition(":")[0] for name, outcome in results.items() if outcome == "passed")
    others = {name: outcome for name, outcome in results.items() if outcome != "passed"}
    return [
        *(f"| {group}: {count} checks | passed |" for group, count in sorted(passed.items())),
        *(f"| {name} | {_cell(outcome)} |" for name, outcome in sorted(others.items())),
    ]


def _verdict(evidence):
    """Return the word at the head of the page: a part that did not run is never passed over."""
    if evidence["is_green"]:
        return "Passed"
    outcomes = evidence["results"].values()
    return "INCOMPLETE" if all(one == "passed" or one.startswith("not run") for one in outcomes) else "FAILED"


def _cell(text):
    """Return a text that stays in its cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def write_evidence(path, evidence):
    Path(path).write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n")
