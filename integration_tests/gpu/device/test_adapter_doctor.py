"""The doctor through the adapter: two processes, a real handshake, memory of the device, fences, and transports by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_nixl_agent.tools.selftest import TRANSPORT_ENVIRONMENT, is_tcp, read_paths

DOCTOR = Path(__file__).parent / "adapter_doctor.py"
WITHIN_S = 120.0


def start(role: str, device: torch.device, **environment: str) -> subprocess.Popen[str]:
    # Both sides work out what a page must hold from a hash of text.
    env = {**os.environ, "PYTHONHASHSEED": "0", **environment}
    command = [sys.executable, str(DOCTOR), role, str(device)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, env=env, **pipes)


def reported(text: str) -> Any:
    lines = [line for line in text.splitlines() if line.startswith("TOLD ")]
    assert lines, text[-3000:]
    return json.loads(lines[-1].removeprefix("TOLD "))


def stated_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith("TOLD "):
            return line.removeprefix("TOLD ")
    raise AssertionError(f"the process ended: {seen[-3000:]}")


@pytest.mark.full
def test_a_hand_over_between_processes_names_its_transports(
    device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    producer = start("producer", device)
    consumer = start("consumer", device, **TRANSPORT_ENVIRONMENT)
    try:
        log, _ = consumer.communicate(stated_by(producer), timeout=WITHIN_S)
        assert consumer.returncode == 0, log[-3000:]
        rest, _ = producer.communicate("done\n", timeout=WITHIN_S)
        assert reported(rest) == "all blocks are free"
        assert producer.returncode == 0
    finally:
        for process in (producer, consumer):
            process.kill()
            process.wait()
    figures = reported(log)
    assert figures["fence_checks"] == figures["reads"] > 0
    assert figures["fences_rejected"] == 0
    memory = "host" if device.type == "cpu" else device.type
    paths = [path for path in read_paths(log) if path.into.startswith(memory) and path.source.startswith(memory)]
    assert paths, "UCX names no read between memory of this kind"
    for name in ("first_hand_over_ms", "hand_over_ms", "megabytes"):
        record_property(name, f"{figures[name]:.2f}")
    for path in paths:
        record_property(f"{path.into} from {path.source}, {path.sizes}", f"{path.method}: {path.config}")
    assert not all(map(is_tcp, paths)), paths
