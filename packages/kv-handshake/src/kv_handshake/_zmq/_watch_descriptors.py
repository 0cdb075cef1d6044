"""The descriptors of the watch over a listener's connections."""

from __future__ import annotations

import contextlib
import os
import select
import uuid
from typing import cast, final

import zmq

from kv_handshake._zmq._grip import Grip

__all__ = ["WatchDescriptors"]

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
"""Not `EVENT_MONITOR_STOPPED`, which libzmq sends even if that means to wait for a reader."""


@final
class WatchDescriptors:
    """The descriptors of a watch: libzmq's news of connections, the kernel's, a look at both ends, and a bell.

    The monitor's queue has no limit: at one, libzmq's own thread would wait, holding a lock that `close` needs.
    """

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        with contextlib.ExitStack() as undo:
            self.grip = Grip()
            undo.callback(self.grip.close)
            self.arrivals = select.epoll()
            undo.callback(self.arrivals.close)
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._bell)
            self._rest = select.poll()
            self._rest.register(self._bell, select.POLLIN)
            url = f"inproc://watch-{uuid.uuid4().hex}"
            sock.monitor(url, _EVENTS)
            undo.callback(sock.disable_monitor)
            context = cast("zmq.Context[zmq.Socket[bytes]]", sock.context)  # pyright: ignore[reportUnknownMemberType]
            self.monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
            self.monitor.setsockopt(zmq.RCVHWM, 0)
            self.monitor.connect(url)
            undo.pop_all()

    def poller(self) -> zmq.Poller:
        """Return a poller of all three."""
        poller = zmq.Poller()
        for each in (self.monitor, self.arrivals.fileno(), self._bell):
            poller.register(each, zmq.POLLIN)
        return poller

    def rest(self, seconds: float) -> bool:
        """Wait, unless the bell has been rung; return whether it was. One call: a query may be under way on another thread."""
        return bool(self._rest.poll(seconds * 1000))

    def wake(self) -> None:
        """Ring the bell: the poller returns."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Give all descriptors back."""
        self.monitor.close(0)
        self.arrivals.close()
        self.grip.close()
        os.close(self._bell)
