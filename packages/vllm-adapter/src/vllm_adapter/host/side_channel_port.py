"""The port of the side channel. Imports nothing of vLLM, because Ray Serve loads an app file where no engine runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from vllm_adapter.errors import UnsupportedHost

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PORT_VARIABLE", "listening_port"]

PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_SHOWN_CHARACTERS = 80


def listening_port(read: Callable[[], int], data_parallel_index: int) -> int:
    """Return the port on which an engine's side channel listens: the environment's port plus the data-parallel index.

    Args:
        read: Returns the number in `PORT_VARIABLE`, or its default.
        data_parallel_index: The engine's place among those of its data-parallel group. Source: vLLM's own connector adds it.

    Raises:
        UnsupportedHost: `side-channel-port`: the variable holds no number.
    """
    try:
        return read() + data_parallel_index
    except ValueError:
        value = os.environ.get(PORT_VARIABLE, "")
        hint = ""
        if "://" in value:
            hint = (
                "; Kubernetes sets it so in every pod beside a Service named vllm-nixl-side-channel: rename that Service, set "
                "the variable in the pod's env, or enableServiceLinks to false in its spec"
            )
        raise UnsupportedHost(
            f"{PORT_VARIABLE} is {value[:_SHOWN_CHARACTERS]!r}, which is no number: it must be a port, 1 to 65535{hint}",
            code="side-channel-port",
            fault="environment",
            context={"variable": PORT_VARIABLE, "value": value},
        ) from None
