"""Saves, restores and conversions on the streams that torch has for the device, behind and before work on the engine's stream.

`integration_tests/host/inside/test_streams.py` holds the order on a fake device that is as late as streams allow. Here the
device is a real one: on CUDA the engine's stream is kept busy, so that a missing event shows as wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kv_topology import PageMove
from vllm_adapter.host.device_streams import streams_of
from vllm_adapter.host.torch_mirror import TorchMirror
from vllm_adapter.host.torch_pages import TorchPages
from vllm_adapter.worker.pages import ConversionStep, PageCopy, PageRange

PAGES, PAGE_BYTES = 256, 1 << 16
CHOSEN = np.array([1, 2, 5, 7, 8, 9, 11, 200, 255], np.int64)
ROUNDS = range(8)
BUSY_SIZE = 2048


def keep_busy(device: torch.device) -> None:
    """Give the current stream some milliseconds of work, which a CPU does at once."""
    if device.type != "cpu":
        square = torch.ones((BUSY_SIZE, BUSY_SIZE), device=device)
        for _ in range(8):
            square = square @ square / BUSY_SIZE


@pytest.fixture
def cache(device: torch.device) -> torch.Tensor:
    return torch.zeros((PAGES, PAGE_BYTES), dtype=torch.uint8, device=device)


def test_streams_are_used_where_the_device_has_them(
    device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    streams = streams_of(device)
    assert (streams is None) is (device.type == "cpu")
    record_property("streams", type(streams).__name__)


@pytest.mark.parametrize("scratch_pages", [3, PAGES])
def test_a_restore_comes_between_the_former_owners_step_and_the_next_forward(
    device: torch.device, cache: torch.Tensor, scratch_pages: int
) -> None:
    mirror = TorchMirror({"layer": cache}, scratch_bytes=scratch_pages * PAGE_BYTES)
    twin = mirror.tensors["layer"]
    ranges = (PageRange(twin.data_ptr(), PAGE_BYTES, PAGES),)
    others = np.setdiff1d(np.arange(PAGES), CHOSEN)
    for number in ROUNDS:
        twin[:] = torch.from_numpy(np.random.default_rng(number).integers(1, 256, (PAGES, PAGE_BYTES), np.uint8))
        keep_busy(device)
        cache.fill_(7)  # the former owner's last step, still under way when the read is ordered
        ordered = mirror.mark()
        keep_busy(device)  # the forward that runs meanwhile
        mirror.restore([PageCopy(ranges, PAGE_BYTES, CHOSEN)], ordered)
        expected = twin[CHOSEN].clone()
        twin.fill_(0xEE)  # the mirror's pages may be read into again at once
        seen = cache.clone()  # the next forward
        assert torch.equal(seen[CHOSEN].cpu(), expected), number
        assert bool((seen[others] == 7).all())


def test_a_save_holds_what_the_forward_before_it_wrote(device: torch.device, cache: torch.Tensor) -> None:
    mirror = TorchMirror({"layer": cache})
    twin = mirror.tensors["layer"]
    ranges = (PageRange(twin.data_ptr(), PAGE_BYTES, PAGES),)
    for number in ROUNDS:
        keep_busy(device)
        cache.fill_(number + 1)
        mirror.save([PageCopy(ranges, PAGE_BYTES, CHOSEN)], mirror.mark())
        assert bool((twin[CHOSEN] == number + 1).all())


def test_a_conversion_comes_between_the_forwards_around_it(device: torch.device, cache: torch.Tensor) -> None:
    content = np.random.default_rng(2).integers(0, 256, (PAGES, PAGE_BYTES), np.uint8)
    half = PAGE_BYTES // 2
    moves = (PageMove((half,), 1, 0, (1,), half, (1,)), PageMove((half,), 1, half, (1,), 0, (1,)))
    pages = TorchPages([cache], scratch_bytes=2 * PAGE_BYTES)
    ranges = (PageRange(cache.data_ptr(), PAGE_BYTES, PAGES),)
    for _ in ROUNDS:
        keep_busy(device)
        cache.copy_(torch.from_numpy(content))
        numbers = CHOSEN.copy()
        pages.convert([ConversionStep(0, PAGE_BYTES, moves, ranges, numbers)])
        numbers[:] = 0
        seen = cache.clone().cpu().numpy()
        expected = content.copy()
        expected[CHOSEN] = np.roll(content[CHOSEN], half, 1)
        np.testing.assert_array_equal(seen, expected)
