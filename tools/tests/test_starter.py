"""Engines that the starter has forked end with it, those that are stopped as well."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvdev.paths import ROOT

SERVER = """
import time

def main():
    import of_this_engine

    print("up", of_this_engine.NUMBER, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["pipe", "SIGTERM"])
def test_a_stopped_engine_ends_with_the_starter(tmp_path: Path, end: str) -> None:
    # Parts of a vLLM whose server only sleeps.
    modules = {"vllm/entrypoints/launchers/api_server/entry.py": SERVER, "own/of_this_engine.py": "NUMBER = 7"}
    spawning = ("engine/coordinator", "engine/utils", "executor/multiproc_executor")
    for name, text in {**modules, **{f"vllm/v1/{each}.py": "" for each in spawning}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    log = tmp_path / "engine.log"
    orders, theirs = multiprocessing.Pipe()
    command = [sys.executable, "-P", str(ROOT / "tools/kvdev/starter.py"), str(theirs.fileno())]
    with subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]) as starter, orders:
        theirs.close()
        assert orders.recv(), "most of vLLM is not here"
        own = {**environment, "PYTHONPATH": str(tmp_path / "own")}
        orders.send({"arguments": [], "environment": own, "log": str(log)})
        engine = orders.recv()
        until = time.monotonic() + 60
        while not log.exists() or log.read_text() != "up 7\n":
            assert time.monotonic() < until
            time.sleep(0.02)
        os.killpg(engine, signal.SIGSTOP)
        began_s = time.monotonic()
        if end == "pipe":
            orders.close()
        else:
            starter.send_signal(signal.SIGTERM)
        starter.wait(timeout=60)
        assert time.monotonic() - began_s < 15, "it was killed after a while, and did not end by itself"
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)
