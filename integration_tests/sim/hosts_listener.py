"""Side channel's listener of vLLM's own connector, as it behaves on the wire: one loop that ends with the first error."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq

COMMAND = b"get_meta_msg"


class HostsListener:
    """Answers queries [command, pp rank, tp rank] of one shape, for the ranks that it has.

    `asked` are the queries that came, `death` is the error that ended the loop.
    """

    def __init__(self, served: Mapping[tuple[int, int], bytes]) -> None:
        self.asked: list[Any] = []
        self.death = ""
        self._served = dict(served)
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.rcvtimeo = 50
        self.port = int(self._socket.bind_to_random_port("tcp://127.0.0.1"))
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_ending.is_set():
                self._answer()
        except Exception as error:  # as it would end vLLM's thread
            self.death = repr(error)
        finally:
            self._socket.close(linger=0)

    def _answer(self) -> None:
        try:
            identity, _, query = self._socket.recv_multipart()
        except zmq.Again:
            return
        self.asked.append(msgspec.msgpack.decode(query))
        _, pp, tp = self.asked[-1]
        clock = msgspec.msgpack.encode(time.perf_counter())
        self._socket.send_multipart((identity, b"", self._served[pp, tp], clock))

    def close(self) -> None:
        self._is_ending.set()
        self._thread.join()


def ask(port: int, *query: object, within_s: float = 0.5) -> bool:
    """Send a query by hand; return whether an answer came."""
    socket = zmq.Context.instance().socket(zmq.REQ)
    try:
        socket.linger, socket.rcvtimeo = 0, round(1e3 * within_s)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(msgspec.msgpack.encode(query))
        return bool(socket.recv_multipart())
    except zmq.Again:
        return False
    finally:
        socket.close()
