"""Engines are killed ten times under load, on each side and on each transport."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from live import Setting, Warm, started_live
from series import Series, kill_under_load, write_report

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        os.environ.get("KVDEV_LONG") != "1", reason="engines are killed 40 times: dev.py test --long chaos"
    ),
]
KILLS = int(os.environ.get("KVDEV_CHAOS_KILLS", "10"))
TRANSPORTS: dict[str, dict[str, str]] = {"default": {}, "tcp": {"UCX_TLS": "tcp"}}
VICTIMS = {"prefill": ("prefill-0", "prefill-1"), "decode": ("decode-0", "decode-1")}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("side", VICTIMS)
def test_engines_are_killed_under_load_and_every_request_ends_well(warm: Warm, side: str, transport: str) -> None:
    label = f"{side}-{transport}"
    victims: Sequence[str] = VICTIMS[side]
    with started_live(warm, Setting(label, TRANSPORTS[transport])) as live:
        report = kill_under_load(live, Series(label, transport, victims, KILLS, seed=len(label)))
        live.recorder.write(write_report(f"kills-{label}", report).with_suffix(".samples.json"))
    print(report)
    assert not report.bad, f"{report.verdicts}: {report.bad}"
    assert report.verdicts["right"] > report.requests / 2
    assert report.healthy_pairs["requests"] == report.healthy_pairs["right"] > 0
    assert not report.stranded
    if transport == "default":
        assert not report.deaths_of_survivors
        # Counters of engines that were killed began anew.
        assert report.handed_over > 0 or side == "decode"
