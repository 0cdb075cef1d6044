"""Waiting for a key at a terminal, without the Enter that a terminal usually waits for."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["single_keys", "wants_end"]

_ENDS = frozenset({b"q", b"Q", b"\x04", b""})
"""q, Ctrl-D, and the end of the input; Ctrl-C comes as a signal."""


@contextmanager
def single_keys() -> Generator[None]:
    """Let a terminal hand on each key at once, and put it back at the end; does nothing where the input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def wants_end(within_s: float) -> bool:
    """Wait, and tell whether somebody has pressed a key that ends the view; without a terminal only wait."""
    if not sys.stdin.isatty():
        time.sleep(within_s)
        return False
    until_s = time.monotonic() + within_s
    while (left_s := until_s - time.monotonic()) > 0:
        readable, _, _ = select.select([sys.stdin], [], [], left_s)
        if readable and os.read(sys.stdin.fileno(), 1) in _ENDS:
            return True
    return False
