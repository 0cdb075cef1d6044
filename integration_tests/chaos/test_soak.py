"""Five thousand requests with faults and clients that leave, in twenty minutes or more: nothing grows, nothing is stranded."""

from __future__ import annotations

import os

import pytest
from live import Setting, Warm, started_live
from series import write_report
from soak import Soak, soak

pytestmark = [
    pytest.mark.timeout(5400),
    pytest.mark.skipif(os.environ.get("KVDEV_LONG") != "1", reason="twenty minutes: dev.py test --long chaos"),
]
REQUESTS = int(os.environ.get("KVDEV_CHAOS_REQUESTS", "5000"))
SECONDS = float(os.environ.get("KVDEV_CHAOS_SECONDS", "1200"))


def test_a_soak_of_faults_leaves_memory_handles_and_sockets_flat(warm: Warm) -> None:
    with started_live(warm, Setting("soak")) as live:
        report = soak(live, Soak(REQUESTS, SECONDS, seed=16))
        live.recorder.write(write_report("soak", report).with_suffix(".samples.json"))
    print(report)
    assert not report.bad, f"{report.verdicts}: {report.bad}"
    assert report.verdicts["right"] > 0.8 * report.requests
    assert not report.too_large
    assert not report.stranded
    assert sum(report.faults.values()) >= SECONDS / 60
