"""The rank's device becomes the transfer thread's, before NIXL is touched there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_engine import FullEngine

from kv_nixl_agent.testing import FakeFabric
from vllm_adapter.host import connector as connector_module
from vllm_adapter.host.device_streams import device_selector


class Module:
    """A torch device module that notes who selects what."""

    def __init__(self) -> None:
        self.selected: list[tuple[str, torch.device]] = []

    def set_device(self, device: torch.device) -> None:
        self.selected.append((threading.current_thread().name[:8], device))


def test_the_tensors_device_is_selected_and_a_processor_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    assert device_selector([torch.empty(1)]) is None
    select = device_selector([torch.empty(1, device="meta")])
    assert select is not None
    assert not module.selected
    select()
    assert module.selected == [("MainThre", torch.device("meta"))]


def test_the_connector_selects_its_device_on_the_transfer_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, fabric = Module(), FakeFabric()
    events: list[str] = []

    def port(*given: Any, **more: Any) -> Any:
        events.append(f"NIXL after {len(module.selected)}")
        return fabric.port(*given, **more)

    def selector(tensors: Any) -> Any:
        (tensor,) = tensors
        return lambda: module.set_device(tensor.device)

    monkeypatch.setattr(connector_module, "device_selector", selector)

    with closing(FullEngine(tmp_path, monkeypatch, SimpleNamespace(port=port))):
        assert module.selected == [("kv-nixl-", torch.device("cpu"))]
        assert events == ["NIXL after 1"]


@pytest.mark.full
def test_vllms_call_of_the_plugin_notes_the_cores_before_a_thread_is_bound() -> None:
    program = """
import os
from vllm.plugins import load_general_plugins
load_general_plugins()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from vllm_adapter.cores import use_allowed_cores
use_allowed_cores()
print(sorted(os.sched_getaffinity(0)))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert run.stdout.strip().splitlines()[-1] == str(sorted(os.sched_getaffinity(0)))
