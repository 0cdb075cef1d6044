"""Processes of engines under test sleep where vLLM would yield in a loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvdev.engines import Engine, EngineSpec

_TIMED = "import os, time; began = time.perf_counter(); [os.sched_yield() for _ in range(50)]; print(time.perf_counter() - began)"


def test_every_process_of_an_engine_sleeps_instead_of_yielding() -> None:
    spec = EngineSpec("none", Path("model"), "0", environment={"PYTHONPATH": "of the test"})
    engine = Engine.__new__(Engine)
    engine.spec, engine.side_channel_port, engine._sockets = spec, 1, "sockets"
    environment = engine._environment()
    assert environment["PYTHONPATH"].endswith(":of the test")
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_TIMED!r}], check=True)"
    took_s = subprocess.run(
        [sys.executable, "-c", parent], env=environment, capture_output=True, check=True, timeout=60
    )
    assert float(took_s.stdout) > 50 * 0.0001
