"""Remaining descriptors (open files and sockets) of this process.

An agent that connects to a peer without enough descriptors leaves UCX with half a connection: the local UCX cannot accept the
connections that the peer opens in return, and a peer whose connection is refused in that state may be aborted by its own UCX. So
the number is checked first.
"""

from __future__ import annotations

import os
import resource
from typing import Final

from ._errors import AgentError

__all__ = ["A_PEER_NEEDS", "descriptors_left", "refuse_without_descriptors"]

A_PEER_NEEDS: Final = 32
"""More than UCX opens for a peer with four worker threads: 5 stay open on one host, 10 over TCP."""


def descriptors_left() -> int | None:
    """Return how many more descriptors this process may open; None where there is no limit or it is unknown."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        # The list includes the descriptor of the directory itself, which is closed again.
        return max(0, most - len(os.listdir("/proc/self/fd")) + 1)  # noqa: PTH208 - half the time, and each peer asks
    except FileNotFoundError:
        return None
    except OSError:
        return 0


def refuse_without_descriptors() -> None:
    """Do nothing if descriptors for a peer remain.

    Raises:
        AgentError: `no-descriptors`.
    """
    left = descriptors_left()
    if left is not None and left < A_PEER_NEEDS:
        raise AgentError(
            "no-descriptors",
            f"only {left} more descriptors may be opened by this process, and meeting a peer needs up to {A_PEER_NEEDS}: "
            "raise its limit (`ulimit -n`, or LimitNOFILE of its service)",
            left=left,
        )
