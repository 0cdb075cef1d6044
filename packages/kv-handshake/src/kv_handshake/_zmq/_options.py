"""Socket options that both ends share."""

from __future__ import annotations

from typing import Any

import zmq

__all__ = ["HIGH_WATER_MARK", "NOBLOCK_AND_MORE", "set_options"]

HIGH_WATER_MARK = 256
"""Messages queued per peer. The transport counts what was read in halves of it, so half of it may be under way."""

NOBLOCK_AND_MORE = zmq.NOBLOCK | zmq.SNDMORE


def set_options(target: zmq.Socket[Any], *options: tuple[int, int]) -> None:
    """Set integer options of a socket."""
    for name, value in options:
        target.setsockopt(name, value)
