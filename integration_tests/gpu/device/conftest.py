"""The device that these tests run on: `KVDEV_DEVICE`, cpu unless it says cuda. The test bodies are the same on both."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parents[1] / name) for name in ("fakes", "sim"))]

from made import maker  # noqa: E402  (of the fakes)
from torch_engine import TorchEngine  # noqa: E402  (beside this file)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The last device of the kind that was asked for; a test that was asked to run on a GPU never runs without one."""
    kind = os.environ.get("KVDEV_DEVICE", "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    assert torch.cuda.is_available(), f"KVDEV_DEVICE={kind}, but torch sees no CUDA device"
    return torch.device(kind, torch.cuda.device_count() - 1)


@pytest.fixture
def make(device: torch.device) -> Iterator[Callable[..., TorchEngine]]:
    """A maker of engines with their caches on the device, on real NIXL, closed at the end."""
    yield from maker(partial(TorchEngine, device=device))
