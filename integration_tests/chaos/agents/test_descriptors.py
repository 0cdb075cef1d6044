"""A producer that has no descriptors left when a reader meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("starved_producer.py")
pytestmark = pytest.mark.skipif(os.environ.get("KVDEV_LONG") != "1", reason="takes a minute: dev.py test --long chaos")


RUNS = 3


@pytest.mark.timeout(240)
def test_a_producer_without_descriptors_is_out_of_reach_and_ends_readers(figure: Callable[[str], None]) -> None:
    """Where no reader ends any more, UCX may have been mended: then the row in `docs/failure-modes.md` changes."""
    ends: dict[str, list[int]] = {"default": [], "tcp": []}
    for transport, codes in ends.items():
        for _ in range(RUNS):
            done = subprocess.run([sys.executable, SCRIPT, transport], capture_output=True, text=True, check=False)
            codes.append(done.returncode)
            if not done.returncode:
                assert set(json.loads(done.stdout.splitlines()[-1]).values()) <= {"peer-disconnected", "unknown-peer"}
    figure(f"exit codes of readers that met a producer without descriptors: {ends}")
    codes = ends["default"] + ends["tcp"]
    assert set(codes) <= {0, -signal.SIGABRT, -signal.SIGSEGV}
    assert any(codes)
