"""CPU time of two idle engines in one run: one with our connector, one with vLLM's own."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from fleets import hosts_own, probe_environment, probed, prompt, started_fleet
from processes import family_of

from kvdev.engines import Engine

IDLE_S = 10.0
MOST_SHARE = 0.06
"""Of a core, of one thread, counted in steps of 0.001. On a quiet machine it is below 0.01, beside busy neighbours up to 0.03."""
_UTIME, _STIME = 11, 12
"""Fields of a thread's `stat`, counted from behind its name. Source: proc(5)."""


def test_an_idle_engine_takes_a_fraction_of_what_it_takes_with_vllms_connector(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The progress thread is on in both, as it is where there are cores to spare.
    with started_fleet(
        "dense",
        {"ours": probed(), "vllms": hosts_own(), "alone": None},
        environments={"ours": probe_environment(tmp_path, progress_thread="on")},
    ) as fleet:
        for name in fleet.engines:
            fleet.answers([prompt(1)], decode=name)
        time.sleep(3)
        before = {name: threads_of(engine) for name, engine in fleet.engines.items()}
        time.sleep(IDLE_S)
        after = {name: threads_of(engine) for name, engine in fleet.engines.items()}
    shares = {
        name: sorted(((seconds - before[name].get(tid, 0)) / IDLE_S for tid, seconds in now.items()), reverse=True)
        for name, now in after.items()
    }
    total = {name: sum(parts) for name, parts in shares.items()}
    with capsys.disabled():
        print(f"\nidle engines, whole, in cores: {', '.join(f'{name} {share:.4f}' for name, share in total.items())}")
        for name, parts in shares.items():
            print(f"  {name} by thread: {', '.join(f'{part:.4f}' for part in parts[:6])}")
    assert shares["ours"][0] < MOST_SHARE  # of whatever thread: the transfer thread and NIXL's own are among them
    assert total["ours"] < total["vllms"] / 5
    assert total["ours"] - total["alone"] < MOST_SHARE


def threads_of(engine: Engine) -> dict[int, float]:
    """Return the CPU seconds of every thread of an engine's processes, by thread id."""
    ticks = os.sysconf("SC_CLK_TCK")
    found: dict[int, float] = {}
    for pid in family_of(engine.pid):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone meanwhile
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                found[int(thread.name)] = (int(fields[_UTIME]) + int(fields[_STIME])) / ticks
    return found
