"""Preparation of a rank's device: its selection on threads that the host did not start, and AMX. In the host's process only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["device_selector", "request_amx"]


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


def request_amx(tensors: Iterable[torch.Tensor]) -> None:
    """Ask the operating system for AMX where the cache is in a CPU's memory; do nothing on CPUs without it.

    Linux ends a process with SIGILL that uses AMX without having asked. vLLM's bfloat16 attention kernel does not ask; oneDNN
    does, when the engine computes a longer prompt. So an engine whose first work was a read would end at its first token.
    """
    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None and next(iter(tensors)).device.type == "cpu":
        ask()
