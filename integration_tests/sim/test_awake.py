"""The clock behind bounds on waiting: it counts waits and work, and no time in which the machine stood still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from awake import AwakeClock

_STOPPED = """
import time
from awake import AwakeClock
with AwakeClock() as clock:
    time.sleep(0.1)
    print("ready", flush=True)
    input()
    print(clock(), flush=True)
"""


def work(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        sum(range(1_000))


def test_a_wait_counts() -> None:
    with AwakeClock() as clock:
        time.sleep(0.5)
        assert clock() > 0.4


def test_work_that_keeps_all_threads_waiting_counts() -> None:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)  # as a call into C that does not let go of the interpreter
    try:
        with AwakeClock() as clock:
            work(0.5)
            sys.setswitchinterval(interval_s)
            time.sleep(0.02)
            assert clock() > 0.4
    finally:
        sys.setswitchinterval(interval_s)


def test_a_stopped_process_counts_nothing() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _STOPPED],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        assert float(child.stdout.readline()) < 1
