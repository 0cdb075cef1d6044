"""Switches for controls in tests: off unless an environment variable is set, and loud when it is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, final

import torch

from vllm_adapter.host.vllm import init_logger

if TYPE_CHECKING:
    from vllm_adapter.worker.transfer.reads import ReadEnd

__all__ = ["CORRUPT_VARIABLE", "HOST_BUFFER_VARIABLE", "PageCorrupter", "is_host_buffer_forced", "page_corrupter"]

CORRUPT_VARIABLE = "KV_TRANSFER_TEST_CORRUPT_PAGE"
HOST_BUFFER_VARIABLE = "KV_TRANSFER_TEST_HOST_BUFFER"
_logger = init_logger("vllm.vllm_adapter")


def page_corrupter() -> PageCorrupter | None:
    """Return a corrupter if the test switch is set, else None."""
    return PageCorrupter() if os.environ.get(CORRUPT_VARIABLE) == "1" else None


def is_host_buffer_forced() -> bool:
    """Tell whether the test switch asks for host-buffer mode on a device that does not need it."""
    is_forced = os.environ.get(HOST_BUFFER_VARIABLE) == "1"
    if is_forced:
        _logger.warning("%s is set: the cache is mirrored in host memory. For tests only.", HOST_BUFFER_VARIABLE)
    return is_forced


@final
class PageCorrupter:
    """Flips one byte of the first page that each hand-over brought: the control of every comparison of texts."""

    def __init__(self) -> None:
        self._cache: torch.Tensor | None = None
        _logger.warning("%s is set: one byte of every hand-over will be WRONG. For tests only.", CORRUPT_VARIABLE)

    def attach(self, caches: dict[str, torch.Tensor]) -> None:
        """Choose the first layer's cache."""
        self._cache = next(iter(caches.values()))

    def __call__(self, end: ReadEnd) -> None:
        """Make one element of the request's first received block huge, by its most significant byte.

        Three quarters into a page lies a value, not a key, in every layout that the host has; whatever weight attention
        gives it, it shows.
        """
        blocks = next((group for group in end.order.local_block_ids if group), None)
        if self._cache is None or blocks is None:
            return
        page = self._cache[blocks[0]]
        place = tuple(3 * length // 4 for length in page.shape)
        page[place].view(1).view(torch.uint8)[-1] = 0x7F
