"""Selection of a rank's device for threads that the host did not start. Imported in the host's process only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["device_selector"]


def device_selector(tensors: Iterable[torch.Tensor]) -> Callable[[], None] | None:
    """Return a function that makes the tensors' device current on the calling thread; None on a CPU.

    The current device belongs to a thread, and a new thread starts with device 0. Without this, UCX would treat rank 3's
    transfers as device 0's, in a separate context and without NVLink. Source: vLLM issue 36475.
    """
    device = next(iter(tensors)).device
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)

    def select() -> None:
        module.set_device(device)

    return select
