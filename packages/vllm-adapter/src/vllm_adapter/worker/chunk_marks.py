"""Actions that wait until the device has finished earlier work: a chunk's tokens may be shown then, never before.

Theory of operation. Where a call returns only when its work is done (CPU), an action runs at once. On a device with streams the
engine thread records a mark in its stream behind the forward pass and continues; one thread of this module waits for the marks
in order and runs the actions. With a host buffer readers take the mirror's pages, so an action waits for the copies instead
(`HostMirror.then`).
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ChunkMarks", "DeviceMarks"]

_LOOK_S: Final = 0.0005
"""Interval at which a mark is polled; the thread sleeps while there is none."""


class DeviceMarks(Protocol):
    """Marks behind all the work that the calling thread has given the device so far."""

    def mark(self) -> object:
        """Record and return a mark; never waits."""
        ...

    def is_over(self, mark: object) -> bool:
        """Return whether everything before the mark is done; any thread."""
        ...


@final
class ChunkMarks:
    """Runs actions in the order in which they were given, each once the device has reached its mark.

    Args:
        device: The device's marks; None where calls return only when their work is done.
        trouble: Receives the exception of an action or of polling a mark; later actions still run.
    """

    def __init__(self, device: DeviceMarks | None, trouble: Callable[[str, Exception], None]) -> None:
        self._device = device
        self._trouble = trouble
        self._waiting: SimpleQueue[tuple[object, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def then(self, action: Callable[[], None]) -> None:
        """Run an action after the work that the calling thread has given the device so far; engine thread, never waits."""
        if self._device is None:
            action()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._device,), name="kv-chunk-marks", daemon=True)
            self._thread.start()
        self._waiting.put((self._device.mark(), action))

    def close(self) -> None:
        """Run no more actions; idempotent."""
        self._is_closed = True
        self._waiting.put(None)

    def _run(self, device: DeviceMarks) -> None:
        while (item := self._waiting.get()) is not None:
            mark, action = item
            try:
                while not device.is_over(mark):
                    if self._is_closed:
                        return
                    time.sleep(_LOOK_S)
                action()
            except Exception as error:  # noqa: BLE001  (a chunk that is not shown costs its readers a fallback, nothing else)
                self._trouble("showing a chunk", error)
