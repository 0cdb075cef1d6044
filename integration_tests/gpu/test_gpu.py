"""The GPU stage under pytest, and what can be tested of it without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from evidence import (  # noqa: E402 - beside this file
    device_facts,
    make_evidence,
    render_page,
)
from run import figures_of, outcomes_of  # noqa: E402 - beside this file

FACTS = {"name": "Fake GPU", "count": 1, "driver": "1.2", "torch": "2", "cuda": "12"}


def test_on_a_gpu(tmp_path):
    """Everything on VRAM; skipped, with the reason, where there is no GPU."""
    facts = device_facts()
    if "reason" in facts:
        pytest.skip(f"no GPU, nothing is shown: {facts['reason']}")
    done = subprocess.run([sys.executable, str(HERE / "run.py"), "--output", str(tmp_path / "e.json")], check=False)
    assert done.returncode == 0


def test_without_a_gpu_the_runner_is_not_green(tmp_path):
    if "reason" not in device_facts():
        pytest.skip("this machine has a GPU")
    output = tmp_path / "e.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--output", str(output)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 77
    assert "NOT RUN, NOT GREEN" in done.stderr
    evidence = json.loads(output.read_text())
    assert (evidence["is_green"], evidence["results"]) == (False, {})


@pytest.mark.parametrize(
    ("facts", "results"),
    [(FACTS, {}), (FACTS, {"a": "passed", "b": "failed: x"}), ({"reason": "none"}, {"a": "passed"})],
)
def test_evidence_is_green_only_for_a_full_pass_on_a_gpu(facts, results):
    assert make_evidence(facts, "nixl 9", results, {})["is_green"] is False


def test_a_part_that_did_not_run_is_shown_and_never_green(tmp_path):
    case = '<testcase name="{}">{}</testcase>'
    cases = [case.format("a", ""), case.format("b", '<skipped message="no room"/>')]
    report = tmp_path / "gpu-device.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    results = {**outcomes_of(report), **outcomes_of(tmp_path / "gpu-engines.xml")}
    assert results == {"gpu-device:a": "passed", "gpu-device:b": "not run: no room", "gpu-engines": "not run"}
    evidence = make_evidence(FACTS, "nixl 9", results, {})
    assert evidence["is_green"] is False
    assert "**INCOMPLETE** at" in render_page(evidence)
    report.write_text(report.read_text().replace("skipped", "failure"))
    results = outcomes_of(report)
    assert results["gpu-device:b"] == "failed: no room"
    assert "**FAILED** at" in render_page(make_evidence(FACTS, "nixl 9", results, {}))


def test_figures_of_tests_are_on_the_page(tmp_path):
    file = tmp_path / "figures.jsonl"
    file.write_text('{"test": "t", "name": "host from host, 0..inf", "value": "zero-copy: cma/memory"}\n')
    figures = figures_of(file)
    page = render_page(make_evidence(FACTS, "nixl 9", {"a": "passed"}, {}, figures))
    assert "| t: host from host, 0..inf | zero-copy: cma/memory |" in page.splitlines()
    assert figures_of(None) == figures_of(tmp_path / "none") == {}
