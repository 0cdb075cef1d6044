"""Descriptors (open files and sockets) that are left to this process.

libzmq ends the process if a context starts without enough of them. So they are counted before.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

__all__ = ["A_CONTEXT_NEEDS", "most_connections", "refuse_without_descriptors"]

A_CONTEXT_NEEDS: Final = 32
"""More than a context opens with its first sockets and what belongs to them: 12 for a client, 21 for a listener with keys."""

_EACH: Final = 4
_SHARE: Final = 2
"""A client's connections take at most one descriptor in this many that the process may open."""


def refuse_without_descriptors() -> None:
    """Do nothing if a context can start.

    Raises:
        OSError: ``EMFILE``: too few descriptors are left.
    """
    left = _descriptors_left()
    if left is not None and left < A_CONTEXT_NEEDS:
        raise OSError(
            errno.EMFILE,
            f"only {left} more files may be opened by this process, and {A_CONTEXT_NEEDS} are needed: raise its limit "
            "(`ulimit -n`, or LimitNOFILE of its service)",
        )


def most_connections(wanted: int) -> int:
    """Return how many connections a client may have: as many as it wants, fewer where the process may open few files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else min(wanted, max(8, files // (_EACH * _SHARE)))


def _descriptors_left() -> int | None:
    """Return how many more descriptors this process may open; None where their number is unlimited or unknown."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        # An entry is that of the directory itself, which is closed again.
        return max(0, most - len(os.listdir("/proc/self/fd")) + 1)  # noqa: PTH208 - no object per descriptor
    except FileNotFoundError:
        return None
    except OSError:
        return 0
