"""The agent's checks with pages in VRAM on one side or both, and the fastest read of each direction."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stages import CHECKS, PAGE_BYTES, PAGES, PLACES, make_stage


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


def test_reads_of_all_pages_in_random_order(stage, record_property):
    stage.connect()
    ids = np.random.default_rng(0).permutation(PAGES)
    best_s = 1e9
    for number in range(10):
        began_s = time.perf_counter()
        assert stage.read(f"b{number}", ids, ids).outcome == "done"
        best_s = min(best_s, time.perf_counter() - began_s)
    record_property("GB/s, best of ten", f"{PAGES * PAGE_BYTES / best_s / 1e9:.2f}")
