"""Conversion and restores on a device with streams: queued in an order that is right however late the device is; no waits.

The device is a fake that does its work in any order that streams and events allow. `integration_tests/gpu/device` runs the same
calls on a real one, where there is one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from fake_device import Event, FakeStreams
from seeds import for_seeds

from kv_topology import PageMove
from vllm_adapter.host.torch_mirror import TorchMirror
from vllm_adapter.host.torch_pages import TorchPages
from vllm_adapter.worker.pages import ConversionStep, PageCopy, PageRange

PAGES, PAGE_BYTES = 16, 64
DEVICES = for_seeds(40)
"""Devices that are early or late in other ways."""


def mirrored(streams: Any, pages_at_once: int = 3) -> tuple[torch.Tensor, torch.Tensor, TorchMirror, PageRange]:
    device = torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8)
    mirror = TorchMirror({"layer": device}, scratch_bytes=pages_at_once * PAGE_BYTES, streams=streams)
    twin = mirror.tensors["layer"]
    twin[:] = torch.from_numpy(np.random.default_rng(1).integers(1, 256, (PAGES, PAGE_BYTES), np.uint8))
    return device, twin, mirror, PageRange(twin.data_ptr(), PAGE_BYTES, PAGES)


def written(pages: torch.Tensor, value: int) -> None:
    pages.fill_(value)


@DEVICES
def test_a_restore_follows_the_blocks_former_owner_and_comes_before_the_next_forward(seed: int) -> None:
    streams = FakeStreams(seed, seed % 5 / 4)
    device, twin, mirror, pages = mirrored(streams)
    chosen = np.array([1, 2, 5, 7, 8, 9, 11, 15], np.int64)
    read: list[torch.Tensor] = []
    # The former owner's last step still writes to the pages when their read is ordered.
    streams.queue(streams.engine, lambda: written(device, 7))
    ordered = mirror.mark()
    # The forward that runs while the pages come in, and the restore in the middle of it.
    streams.queue(streams.engine, lambda: None)
    mirror.restore([PageCopy((pages,), PAGE_BYTES, chosen)], ordered)
    expected = twin[chosen].clone()
    twin.fill_(0xEE)  # the mirror's pages may be read into again at once
    streams.queue(streams.engine, lambda: read.append(device[chosen].clone()))
    streams.finish()
    assert torch.equal(read[0], expected)
    others = [page for page in range(PAGES) if page not in chosen]
    assert (device[others] == 7).all()
    assert streams.synchronized == []


@DEVICES
def test_what_a_failed_restore_has_queued_comes_before_the_next_forward(seed: int) -> None:
    streams = FakeStreams(seed, seed % 5 / 4)
    device, _, mirror, pages = mirrored(streams)
    pinned, made = streams.pinned, list[torch.dtype]()

    def fails_at_the_second(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(dtype)
        if len(made) == 4:  # that of the second round's pages
            raise RuntimeError("out of memory")
        return pinned(shape, dtype)

    streams.pinned = fails_at_the_second
    failures = 0
    for _ in range(8):
        with suppress(RuntimeError):
            mirror.restore([PageCopy((pages,), PAGE_BYTES, np.arange(8))], mirror.mark())
            continue
        failures += 1
    streams.queue(streams.engine, lambda: written(device, 7))  # the blocks' next owner
    streams.finish()
    assert failures == 1
    assert (device == 7).all()


def test_a_restore_does_not_wait_for_the_forward_that_runs() -> None:
    streams = FakeStreams(1)
    device, twin, mirror, pages = mirrored(streams)
    ordered = mirror.mark()
    is_computed, forwards = Event(), list[str]()
    streams.wait(streams.engine, is_computed)
    streams.queue(streams.engine, lambda: forwards.append("the one that ran"))
    mirror.restore([PageCopy((pages,), PAGE_BYTES, np.arange(4))], ordered)
    streams.queue(streams.engine, lambda: forwards.append("the next one"))
    while streams.step():
        pass
    assert torch.equal(device[:4], twin[:4])
    assert not forwards
    is_computed.is_over = True
    streams.finish()
    assert forwards == ["the one that ran", "the next one"]


@DEVICES
def test_restores_one_after_another_each_bring_their_own_bytes(seed: int) -> None:
    streams = FakeStreams(seed, seed % 5 / 4)
    device, twin, mirror, pages = mirrored(streams)
    for round_number in range(6):
        twin.fill_(round_number + 1)
        chosen = np.arange(round_number, round_number + 8)
        mirror.restore([PageCopy((pages,), PAGE_BYTES, chosen)], mirror.mark())
    streams.finish()
    assert device[:, 0].tolist() == [1, 2, 3, 4, 5, *[6] * 8, 0, 0, 0]
    assert streams.synchronized == []


@DEVICES
def test_a_conversion_is_queued_between_the_forwards_around_it(seed: int) -> None:
    streams = FakeStreams(seed, seed % 5 / 4)
    device = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (PAGES, PAGE_BYTES), np.uint8))
    before = device.clone()
    untyped: Any = streams
    pages = TorchPages([device], scratch_bytes=2 * PAGE_BYTES, streams=untyped)
    swap = (PageMove((4,), 8, 0, (8,), 32, (8,)), PageMove((4,), 8, 32, (8,), 0, (8,)))
    seen: list[torch.Tensor] = []
    streams.queue(streams.engine, lambda: seen.append(device.clone()))
    numbers = np.array([3, 4, 6, 9, 12], np.int64)
    pages.convert([ConversionStep(0, 64, swap, (PageRange(device.data_ptr(), PAGE_BYTES, PAGES),), numbers)])
    chosen = numbers.copy()
    numbers[:] = 0
    streams.queue(streams.engine, lambda: seen.append(device.clone()))
    streams.finish()
    after = before.clone()
    after[chosen] = before[chosen].roll(PAGE_BYTES // 2, 1)
    assert torch.equal(seen[0], before)
    assert torch.equal(seen[1], after)
    assert streams.synchronized == []


def test_a_save_is_waited_for_on_its_own_thread_behind_the_forward() -> None:
    streams = FakeStreams(3)
    device, twin, mirror, pages = mirrored(streams)
    streams.queue(streams.engine, lambda: written(device, 9))
    mirror.save([PageCopy((pages,), PAGE_BYTES, np.array([2]))], mirror.mark())
    assert (twin[2] == 9).all()
    assert streams.synchronized == ["side 1"]
