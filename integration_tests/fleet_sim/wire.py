"""Stands for ZeroMQ: client connections and a listener's socket, over the simulated network.

Replies on a connection come in order, as over TCP. A message that a link loses ends its connection; a damaged one arrives
damaged, as from a hostile peer, since TCP itself would repeat it.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, final

from fleet import Fleet
from network import damaged

from kv_handshake.core.server import Incoming, Sender
from kv_handshake.errors import TransportError

_FRAME_BYTES = 1024


@final
class SimConnection:
    """Stands for a client connection."""

    def __init__(self, hub: SimHub, address: str, port: int) -> None:
        self.hub, self.address, self.port = hub, address, port
        self.is_open = False
        self._fleet = hub.fleet
        self.number = next(self._fleet.connection_numbers)
        self.sender = Sender(hub.driver.process.name, self.number)
        self._fault = ""
        self._replies: deque[list[bytes]] = deque()
        self._is_closed = False
        self._last_s = 0.0
        self._slot = hub.driver.process.name
        self._served_by: Any = None
        self._open()

    def _target(self) -> Any:
        return self._fleet.listeners.get((self.address, self.port))

    def _open(self) -> None:
        fleet, listener = self._fleet, self._target()
        peer = fleet.slot_at(self.address, self.port)
        if not peer:
            fleet.world.after(fleet.network.base_s, lambda: self._end("connection-refused"), self.hub.driver.process)
            return
        delay_s = fleet.network.delay_s(self._slot, peer, "zmq")
        if self._is_cut(peer):
            return  # nobody answers; the attempt's deadline ends it
        if listener is None:
            fleet.world.after(delay_s, lambda: self._end("connection-refused"), self.hub.driver.process)
        else:
            self.is_open = True

    def _is_cut(self, peer: str) -> bool:
        network = self._fleet.network
        return network.link(self._slot, peer).is_cut or network.link(peer, self._slot).is_cut

    def _end(self, fault: str) -> None:
        if not self._is_closed and not self._fault:
            self._fault = fault
            self.hub.changed(self)
            self._hang_up()

    def _hang_up(self) -> None:
        """Let the listener learn that the connection is gone."""
        driver, self._served_by = self._served_by, None
        if driver is not None:
            self._fleet.world.after(self._fleet.network.base_s, lambda: driver.hung_up(self.number), driver.process)

    def send(self, query: bytes) -> None:
        fleet, network = self._fleet, self._fleet.network
        peer, listener = fleet.slot_at(self.address, self.port), self._target()
        if not peer or listener is None or self._is_cut(peer):
            return
        delay_s = network.delay_s(self._slot, peer, "zmq", len(query))
        arrives_s = max(fleet.world.time_s + delay_s, self._last_s)
        for sent in self._carried(self._slot, peer, [query], delay_s):
            fleet.world.note(self._slot, "query", peer, arrives_s)
            fleet.world.after(arrives_s - fleet.world.time_s, partial(self._serve, listener, sent), listener.process)
            self._last_s = arrives_s

    def _carried(self, source: str, target: str, frames: list[bytes], delay_s: float) -> list[bytes]:
        """Return frames as they arrive, perhaps damaged; none if the link loses them, which ends the connection."""
        fleet, network = self._fleet, self._fleet.network
        link, draw = network.link(source, target), network.draws(source, target, "zmq faults")
        if draw.random() < link.loss:
            fleet.fault("zmq-loss")
            fleet.world.after(delay_s, lambda: self._end("connection-lost"), self.hub.driver.process)
            return []
        if draw.random() < link.damage:
            fleet.fault("zmq-damage")
            return [damaged(frame, draw) for frame in frames]
        return frames

    def _serve(self, driver: Any, query: bytes) -> None:
        """Answer as the listener's process, at once or, to an ask, later."""
        if not driver.is_running or self._is_closed:
            return
        self.sender.queries += 1
        self._served_by = driver
        reply = driver.serve(self, Incoming((str(self.number).encode(), b""), query, self.sender))
        if reply:
            self.reply(driver, reply)

    def reply(self, driver: Any, reply: list[bytes]) -> None:
        """Send frames back as the listener's process."""
        fleet, network = self._fleet, self._fleet.network
        if self._is_closed or self._fault:
            return
        peer = driver.process.name
        link, draw = network.link(peer, self._slot), network.draws(peer, self._slot, "zmq faults")
        if self._is_cut(peer):
            return
        # Not by their exact length: addresses in them have 14 or 15 digits, as the process happens to lie in memory.
        delay_s = network.delay_s(peer, self._slot, "zmq", _FRAME_BYTES * len(reply))
        arrives_s = max(fleet.world.time_s + delay_s, self._last_s)
        self._last_s = arrives_s
        reply = self._carried(peer, self._slot, reply, delay_s)
        if not reply:
            return
        if draw.random() < link.doubling:
            fleet.fault("zmq-doubling")
            again_s = arrives_s - fleet.world.time_s
            fleet.world.after(again_s, lambda: self._take(list(reply)), self.hub.driver.process)
        fleet.world.note(peer, "reply", self._slot, arrives_s)
        fleet.world.after(arrives_s - fleet.world.time_s, lambda: self._take(reply), self.hub.driver.process)

    def _take(self, frames: list[bytes]) -> None:
        if not self._is_closed:
            self._replies.append(frames)
            self.hub.readable(self)

    def receive(self) -> list[bytes] | None:
        return self._replies.popleft() if self._replies else None

    def fault(self) -> str:
        return self._fault

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._hang_up()


@final
class SimHub:
    """Stands for the client's poll over its connections."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.driver: Any = None
        self.server_keys = 0
        self._readable: dict[SimConnection, None] = {}
        self._changed: dict[SimConnection, None] = {}
        self.open_count = 0

    @property
    def is_ready(self) -> bool:
        """Whether the next poll has something to return."""
        return bool(self._readable or self._changed)

    def open(self, address: str, port: int, _tried: object = None) -> SimConnection:
        self.open_count += 1
        return SimConnection(self, address, port)

    def may_try_again(self, _connection: SimConnection) -> bool:
        """Return False: nothing is encrypted here, so there is no other key to try."""
        return False

    def readable(self, connection: SimConnection) -> None:
        self._readable[connection] = None
        self.wake()

    def changed(self, connection: SimConnection) -> None:
        self._changed[connection] = None
        self.wake()

    def poll(self, timeout_s: float) -> tuple[list[SimConnection], list[SimConnection]]:
        readable, changed = list(self._readable), list(self._changed)
        self._readable.clear()
        self._changed.clear()
        return readable, changed

    def discard(self, connection: SimConnection) -> None:
        self.open_count -= 1
        connection.close()
        self._readable.pop(connection, None)
        self._changed.pop(connection, None)

    def flooded(self) -> list[SimConnection]:
        return []

    def wake(self) -> None:
        if self.driver is not None:
            self.driver.ring()

    def close(self) -> None:
        pass


@final
class SimPort:
    """Stands for a bound TCP port."""

    def __init__(self, fleet: Fleet, endpoint: Any) -> None:
        self._fleet, self.endpoint = fleet, endpoint
        self.driver: Any = None
        if self._key in fleet.listeners:
            raise TransportError("bind-failed", f"port {endpoint.port} is taken")
        fleet.listeners[self._key] = None

    @property
    def _key(self) -> tuple[str, int]:
        return self.endpoint.host, self.endpoint.port

    def bind(self, driver: Any) -> None:
        """Serve this driver's replies from now on."""
        self._fleet.listeners[self._key] = driver

    def wake(self) -> None:
        """Let the driver look for replies that are due."""
        driver = self._fleet.listeners.get(self._key)
        if driver is not None:
            driver.wake()

    def close(self) -> None:
        self._fleet.listeners.pop(self._key, None)


@final
class SimRouter:
    """Stands for the listener's socket."""

    def __init__(self, port: SimPort, *, security: object = None, report: object = None, closed: object = None) -> None:
        self.port = port
        self.security = security
        self.is_outdated = False

    def denied(self) -> dict[str, int]:
        return {}

    def wake(self) -> None:
        self.port.wake()

    def close(self) -> None:
        pass
