"""Asks to many peers at once, from one thread: one connection per peer, many open asks on each, answers in any order.

When a connection ends, its asks move to the peer's next connection, once. If a peer cannot be reached, its asks fail at once and
the peer is left alone for a time that doubles with each failure. Until then, asks for it end with ``recently-failed``, or with
the code of the failure if that is an answer in itself: ``ask-unsupported`` or ``connection-refused``. A connection without open
asks is closed after `_IDLE_S`. The thread sleeps until something arrives or a deadline is due.

A turn looks at the peers that have a connection, open asks or a pending look-up. The failures of all others are remembered apart,
at most `_MOST_PLACES` of them, and cost nothing until the peer is asked again.

At most `Timing.connections` peers have a connection, fewer where the process may open few files. At that limit the idle peer
used longest ago is disconnected, or else one silent for `_PATIENCE_S`. If there is neither, the new peer's asks end with
``too-many-peers``, which does not count against that peer. A peer silent for `Timing.attempt_s` is given up.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, final

from kv_handshake.core.pacing import Backoff
from kv_handshake.errors import HandshakeError, WireError
from kv_handshake.sockets import NOTHING_TRIED, Connection, Hub, Tried, most_connections
from kv_handshake.sockets.names import Names
from kv_handshake.stream.session import AskSession, OpenAsk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from kv_handshake.core.attempt import Timing
    from kv_handshake.core.endpoint import Endpoint
    from kv_handshake.core.pacing import GatedLog
    from kv_handshake.sockets import ClientSecurity

__all__ = ["Asker"]

_IDLE_S = 30.0
"""Below the 60 s after which a listener closes a connection without queries."""
_LONGEST_POLL_S = 60.0
_LOOK_S = 0.1
"""Time between two looks at the number of received bytes while asks are open."""
_JOIN_S = 5.0
_RECOVERY_S = 0.02
_PATIENCE_S = 0.5
"""A peer that has not answered its first query within this time is disconnected if another peer needs its connection."""
_MOST_PLACES = 1024
"""Failed peers that are remembered; the one asked longest ago is forgotten first. Also peers in use beyond which a name is not
looked up, since look-ups hold places without a connection."""
_READ_AT_ONCE = 64
"""Replies of one peer that are read before other peers have their turn."""
_DEFINITE = frozenset({"ask-unsupported", "connection-refused"})
_UNSUPPORTED_S = 30.0
"""A peer that takes no asks is tried again after this time; it may run another release by then."""


@final
class _Peer:
    """A peer with its connection and its failures."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.session = AskSession(endpoint)
        self.connection: Connection | None = None
        self.lookup: Future[list[str]] | None = None
        self.addresses: deque[str] = deque()
        self.connected_s = 0.0
        self.idle_since_s = 0.0
        self.failures = 0
        self.code = ""
        self.until_s = 0.0


@final
class Asker:
    """Asks peers from a thread of its own.

    Args:
        timing: Waits after failures, and how many peers may have a connection at once.
        log: Gets failures.
        security: Keys of an encrypted side channel.
        seed: Seed of the jitter.
    """

    def __init__(self, timing: Timing, log: GatedLog, *, security: ClientSecurity | None, seed: int | None) -> None:
        self._log = log
        self._backoff = Backoff(timing.hold_first_s, timing.hold_most_s)
        self._opening_s = timing.attempt_s
        self._most_connections = most_connections(timing.connections)
        self._random = random.Random(seed)  # noqa: S311 - jitter, not secrets
        self._lock = threading.Lock()
        self._inbox: deque[tuple[Endpoint, OpenAsk | int]] = deque()
        self._number = 0
        self._is_closing = False
        self._counts = Counter({"asks": 0, "asks_answered": 0, "asks_failed": 0, "ask_connections": 0})
        self._peers: dict[Endpoint, _Peer] = {}
        self._failed: OrderedDict[Endpoint, _Peer] = OrderedDict()
        self._by_connection: dict[Connection, _Peer] = {}
        self._next_look_s = 0.0
        self._hub = Hub(security)
        self._names = Names(self._hub.wake, allows_link_local=False)
        self._thread = threading.Thread(target=self._run, name="kv-handshake-asker", daemon=True)
        self._thread.start()

    def ask(
        self, endpoint: Endpoint, payload: bytes, on_reply: Callable[[str, bytes], None], deadline_s: float
    ) -> int | None:
        """Send an ask and return its number, or None after `close`. Callable from any thread."""
        with self._lock:
            if self._is_closing:
                return None
            self._number += 1
            ask = OpenAsk(self._number, payload, on_reply, time.monotonic() + deadline_s)
            self._inbox.append((endpoint, ask))
        self._hub.wake()
        return ask.number

    def cancel(self, endpoint: Endpoint, number: int) -> None:
        """Cancel an ask: its callback is not called any more, unless its call is already running. Callable from any thread."""
        with self._lock:
            self._inbox.append((endpoint, number))
        self._hub.wake()

    def statistics(self) -> Mapping[str, int]:
        """Return the counts so far: ``asks``, ``asks_answered``, ``asks_failed`` and ``ask_connections``."""
        return dict(self._counts)

    def close(self) -> None:
        """End all asks with ``closed`` and stop the thread; idempotent."""
        with self._lock:
            self._is_closing = True
        self._hub.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self._names.close()

    # Everything below runs on the thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - nothing may end the thread: every ask gets its end
                    self._log.warning("restart", f"the client goes on after {error!r}")
                    for peer in list(self._peers.values()):
                        self._fail(peer, "transport-failed")
                    time.sleep(_RECOVERY_S)
        finally:
            with self._lock:
                self._is_closing = True
                waiting = [ask for _, ask in self._inbox if isinstance(ask, OpenAsk)]
            for ask in (*waiting, *[ask for peer in self._peers.values() for ask in peer.session.open.values()]):
                self._end(ask, "closed")
            self._hub.close()

    def _turn(self) -> None:
        self._take_in(time.monotonic())
        readable, changed = self._hub.poll(max(0.0, self._next_event_s() - time.monotonic()))
        for connection in readable:
            self._read(connection)
        for connection in changed:
            self._take_fault(connection)
        self._check_times(time.monotonic())

    def _take_in(self, now_s: float) -> None:
        with self._lock:
            arrived, self._inbox = self._inbox, deque()
        for endpoint, ask in arrived:
            if isinstance(ask, int):
                peer = self._peers.get(endpoint)
                if peer is not None:
                    peer.session.cancel(ask)
                    self._flush(peer)
                continue
            self._counts["asks"] += 1
            peer = self._place_of(endpoint, now_s)
            if now_s < peer.until_s:
                self._end(ask, peer.code if peer.code in _DEFINITE else "recently-failed")
                continue
            peer.session.add(ask)
            peer.idle_since_s = now_s
            if peer.connection is None and peer.lookup is None:
                self._begin(peer)
            else:
                self._flush(peer)

    def _place_of(self, endpoint: Endpoint, now_s: float) -> _Peer:
        """Return a peer in use: as it is, as it failed, or new."""
        peer = self._peers.get(endpoint)
        if peer is None:
            peer = self._failed.pop(endpoint, None)
            if peer is None or now_s >= max(peer.idle_since_s + _IDLE_S, peer.until_s):
                peer = _Peer(endpoint)
            self._peers[endpoint] = peer
        return peer

    def _put_away(self, endpoint: Endpoint) -> None:
        """Take a peer out of use; remember it if it has failed."""
        peer = self._peers.pop(endpoint)
        if peer.failures:
            self._failed[endpoint] = peer
            if len(self._failed) > _MOST_PLACES:
                self._failed.popitem(last=False)

    def _begin(self, peer: _Peer) -> None:
        """Connect to a peer, by its address or after a look-up of its name."""
        endpoint = peer.session.endpoint
        if endpoint.address is not None:
            peer.addresses = deque((endpoint.host,))
            self._connect(peer)
            return
        if len(self._peers) > _MOST_PLACES:
            self._turn_away(peer)
            return
        try:
            peer.lookup = self._names.look_up(endpoint.host)
        except RuntimeError:  # no thread can be made
            self._fail(peer, "transport-failed")

    def _connect(self, peer: _Peer, tried: Tried = NOTHING_TRIED, address: str = "") -> None:
        if not (address or peer.addresses):
            self._fail(peer, "name-unresolved")
            return
        if len(self._by_connection) >= self._most_connections and not self._make_room():
            self._turn_away(peer)
            return
        try:
            connection = self._hub.open(address or peer.addresses.popleft(), peer.session.endpoint.port, tried)
        except HandshakeError as error:
            self._fail(peer, error.code)
            return
        self._counts["ask_connections"] += 1
        peer.connection, peer.connected_s = connection, time.monotonic()
        self._by_connection[connection] = peer
        peer.session.connected()
        self._flush(peer)

    def _turn_away(self, peer: _Peer) -> None:
        for ask in peer.session.take(list(peer.session.open.values())):
            self._end(ask, "too-many-peers")

    def _make_room(self) -> bool:
        """End the connection without open asks that was used longest ago, or else the oldest silent one; False without either."""
        peers = self._by_connection.values()
        idle = min((each for each in peers if not each.session.open), key=lambda each: each.idle_since_s, default=None)
        if idle is not None:
            self._hang_up(idle)
            idle.session.disconnected()
            return True
        oldest = min((each for each in peers if _is_opening(each)), key=lambda each: each.connected_s, default=None)
        if oldest is None or time.monotonic() - oldest.connected_s < _PATIENCE_S:
            return False
        self._fail(oldest, "timed-out")
        return True

    def _flush(self, peer: _Peer) -> None:
        connection = peer.connection
        try:
            while connection is not None and (query := peer.session.next_query()) is not None:
                connection.send(query)
        except HandshakeError as error:
            self._fail(peer, error.code)

    def _read(self, connection: Connection) -> bool:
        """Process some replies; return whether there may be more."""
        peer = self._by_connection.get(connection)
        for _ in range(_READ_AT_ONCE):  # replies that are left wake the next poll
            if peer is None or peer.connection is not connection or (frames := connection.receive()) is None:
                return False
            ended = peer.session.receive(frames)
            if peer.session.error is not None:
                self._refused(peer, peer.session.error)
                return False
            peer.failures = 0
            if ended is not None:
                self._end(*ended)
            self._flush(peer)
        return True

    def _take_fault(self, connection: Connection) -> None:
        peer = self._by_connection.get(connection)
        fault = connection.fault()
        if peer is None or not fault:
            return
        while self._read(connection):  # answers that came before the end of the connection still count
            pass
        if peer.connection is not connection:
            return
        self._hang_up(peer)
        if fault == "connection-refused" and peer.addresses:
            self._connect(peer)
        elif (tried := self._hub.next_try(connection)) is not None:
            self._connect(peer, tried, connection.address)
        elif peer.session.is_greeted:
            for ask in peer.session.disconnected():
                self._end(ask, "connection-lost")
            if peer.session.open:
                self._begin(peer)
        else:
            self._fail(peer, fault)

    def _refused(self, peer: _Peer, error: HandshakeError) -> None:
        """Drop a peer whose messages cannot be used."""
        where = f"{peer.session.endpoint.host} port {peer.session.endpoint.port}"
        self._log.warning("ask", f"{where} cannot be asked: {error}")
        self._fail(peer, error.code)
        if error.code == "ask-unsupported":
            peer.until_s = time.monotonic() + _UNSUPPORTED_S

    def _fail(self, peer: _Peer, code: str) -> None:
        """End all asks of a peer, and leave it alone for a while."""
        self._hang_up(peer)
        asks = peer.session.take(list(peer.session.open.values()))
        peer.session.disconnected()
        peer.lookup, peer.code = None, code
        peer.failures += 1
        peer.until_s = time.monotonic() + self._backoff.delay_s(peer.failures, self._random.random())
        for ask in asks:
            self._end(ask, code)

    def _hang_up(self, peer: _Peer) -> None:
        connection, peer.connection = peer.connection, None
        if connection is not None:
            del self._by_connection[connection]
            self._hub.discard(connection)

    def _end(self, ask: OpenAsk, code: str, payload: bytes = b"") -> None:
        self._counts["asks_failed" if code else "asks_answered"] += 1
        try:
            ask.on_reply(code, payload)
        except Exception as error:  # noqa: BLE001 - a caller's mistake must not end other asks
            self._log.warning("callback", f"on_reply of ask {ask.number} raised {error!r}")

    def _check_times(self, now_s: float) -> None:
        for endpoint, peer in list(self._peers.items()):
            if peer.lookup is not None and peer.lookup.done():
                peer.addresses, peer.lookup = deque(peer.lookup.result()), None
                self._connect(peer)
            self._end_late(peer, now_s)
            if peer.session.open:
                continue
            if now_s >= peer.idle_since_s + _IDLE_S:
                self._hang_up(peer)
                peer.lookup = None
            if peer.connection is None and peer.lookup is None:
                self._put_away(endpoint)
        if now_s >= self._next_look_s and any(peer.session.open for peer in self._peers.values()):
            self._next_look_s = now_s + _LOOK_S
            self._end_flooded()

    def _end_late(self, peer: _Peer, now_s: float) -> None:
        """End a peer's asks that have waited too long, and the connection if it does not open."""
        session = peer.session
        late = [ask for ask in session.open.values() if now_s >= ask.deadline_s]
        for ask in late:
            session.cancel(ask.number)
            self._end(ask, "timed-out")
        self._flush(peer)
        is_slow = _is_opening(peer) and now_s - peer.connected_s >= self._opening_s
        if is_slow or (late and not session.open and peer.connection is not None and not peer.connection.is_open):
            self._fail(peer, "timed-out")

    def _end_flooded(self) -> None:
        for connection in self._hub.flooded():
            self._refused(
                self._by_connection[connection],
                WireError("oversized-reply", "the peer sent more than the largest reply"),
            )

    def _next_event_s(self) -> float:
        now_s = time.monotonic()
        times = [now_s + _LONGEST_POLL_S]
        for peer in self._peers.values():
            if peer.session.open:
                times.append(min(ask.deadline_s for ask in peer.session.open.values()))
                times.append(self._next_look_s if peer.connection is not None else now_s + _LONGEST_POLL_S)
                if _is_opening(peer):
                    times.append(peer.connected_s + self._opening_s)
            else:
                times.append(peer.idle_since_s + _IDLE_S)
        with self._lock:
            return now_s if self._inbox or self._is_closing else min(times)


def _is_opening(peer: _Peer) -> bool:
    """Whether the peer has a connection over which it has said nothing yet."""
    return peer.connection is not None and not peer.session.is_greeted
