"""The device of a rank's cache, for threads that the host did not start. Imported in the host's process only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["device_selector"]


def device_selector(tensors: Iterable[torch.Tensor]) -> Callable[[], None] | None:
    """Return what makes the tensors' device that of the thread which calls it; None on a CPU.

    The current device belongs to a thread, and a new thread begins with device 0: without this, UCX would take rank 3's
    transfers for device 0's, in a context of their own and without NVLink. Source: vLLM issue 36475.
    """
    device = next(iter(tensors)).device
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)

    def select() -> None:
        module.set_device(device)

    return select
