"""The agent's checks with pages in VRAM on one side or both, the fastest read of each direction, and the page of a run."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from record import figures_of, outcomes_of, page_of
from stages import CHECKS, PAGE_BYTES, PAGES, PLACES, make_stage

FACTS = {"name": "Fake GPU", "count": 1}


@pytest.fixture(params=PLACES)
def stage(request):
    torch = pytest.importorskip("torch")
    if "VRAM" in PLACES[request.param] and not torch.cuda.is_available():
        pytest.skip("no GPU, nothing is shown")
    made, close = make_stage(torch, request.param)
    yield made
    close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check, stage):
    check(stage)


def test_reads_of_all_pages_in_random_order(stage, figure):
    stage.connect()
    ids = np.random.default_rng(0).permutation(PAGES)
    best_s = 1e9
    for number in range(10):
        began_s = time.perf_counter()
        assert stage.read(f"b{number}", ids, ids).outcome == "done"
        best_s = min(best_s, time.perf_counter() - began_s)
    figure("GB/s, best of ten", f"{PAGES * PAGE_BYTES / best_s / 1e9:.2f}")


@pytest.mark.parametrize(
    ("facts", "results", "verdict"),
    [
        (FACTS, {"a": "passed"}, "Passed"),
        (FACTS, {}, "INCOMPLETE"),
        (FACTS, {"a": "passed", "b": "not run: x"}, "INCOMPLETE"),
        (FACTS, {"a": "passed", "b": "failed: x"}, "FAILED"),
        ({"reason": "none"}, {"a": "passed"}, "Not run"),
    ],
)
def test_a_page_says_passed_only_of_a_full_pass_on_a_gpu(facts, results, verdict):
    assert f"**{verdict}**" in page_of(facts, results, {})


def test_outcomes_and_figures_come_from_the_parts(tmp_path):
    case = '<testcase name="{}">{}</testcase>'
    cases = [case.format("a", ""), case.format("b", '<skipped message="no room"/>'), case.format("c", "<error/>")]
    (tmp_path / "gpu-device.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    (tmp_path / "figures").write_text('{"test": "t", "name": "host from host, 0..inf", "value": "cma/memory"}\n')
    results = outcomes_of(tmp_path / "gpu-device.xml") | outcomes_of(tmp_path / "gpu-engines.xml")
    assert results == {
        "gpu-device:a": "passed",
        "gpu-device:b": "not run: no room",
        "gpu-device:c": "failed: ",
        "gpu-engines": "not run",
    }
    page = page_of(FACTS, results, figures_of(tmp_path / "figures")).splitlines()
    assert "| t: host from host, 0..inf | cma/memory |" in page
    assert figures_of(tmp_path / "none") == {}
