"""The client loop: many handshakes and asks at once, on one thread.

A task is a handshake, or the asks at one peer. Every task has its own connection and its own times, and the thread never waits
for a single one of them: host names are looked up on other threads, connecting is asynchronous, and one poll covers all
connections. So a peer that is dead, slow or hostile delays no other task.

A task waits until its next attempt is due and there is a place for it. An attempt looks the host's name up, then connects to one
address after the other, until the task is over or the last connection has failed. Then the task decides whether it waits again.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, final

from kv_handshake.errors import HandshakeError, WireError
from kv_handshake.sockets.connections import Connection, Hub
from kv_handshake.sockets.names import Names
from kv_handshake.sockets.tcp import most_connections
from kv_handshake.wire.limits import MAX_REPLY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from kv_handshake.core.asks import PeerAsks
    from kv_handshake.core.handshake import Handshake, Timing
    from kv_handshake.core.pacing import GatedLog
    from kv_handshake.security import ClientSecurity

    Task: TypeAlias = Handshake | PeerAsks

__all__ = ["Loop"]

_IDLE_POLL_S = 60.0
_JOIN_S = 5.0
_RECOVERY_S = 0.02
_LOOK_S = 0.02
"""Time between two looks at how much has come in on connections that owe a reply; most handshakes end before the first."""

_DESCRIPTOR_SHARE = 8
"""Connections take at most one descriptor in this many that the process may open; each takes four."""

_RESERVE = 8
_PATIENCE_S = 0.5
"""A look-up or an attempt that has been silent for so long gives up its place if a host without any place needs it."""

_READ_AT_ONCE = 64
"""Replies of one peer that are read before other peers have their turn."""

_FAULTS: Mapping[str, str] = {
    "connection-refused": "cannot connect to {peer}",
    "connection-lost": "the connection to {peer} ended before all replies had come",
    "authentication-refused": "the connection to {peer} could not be opened: no side channel listens there (a web server, "
    "perhaps), keys on one side only, wrong keys, or too many connections at the peer",
}


@final
@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt under way, which holds a place: first a look-up, if the host is a name, then one connection after the other."""

    task: Task
    lookup: Future[list[str]] | None = None
    connection: Connection | None = None
    addresses: deque[str] = field(default_factory=deque[str])


@final
class Loop:
    """Runs tasks from one thread of its own until they end.

    Args:
        timing: Limit of connections.
        security: Keys of an encrypted side channel; plain TCP without.
        seed: Seed of the jitter, for reproducible tests.
        log: Gets failures of the loop itself.

    Attributes:
        counts: ``attempts`` and ``restarts`` so far.
        random: Numbers for jitter; for the loop's thread.
    """

    def __init__(self, timing: Timing, log: GatedLog, *, security: ClientSecurity | None, seed: int | None) -> None:
        self._most = most_connections(timing.connections, share=_DESCRIPTOR_SHARE)
        self._log = log
        self.random = random.Random(seed)  # noqa: S311 - jitter, not secrets
        self.counts = {"attempts": 0, "restarts": 0}
        self._lock = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_closing = False
        self._waiting: deque[Task] = deque()
        self._under_way: dict[Task, _Attempt] = {}
        self._by_connection: dict[Connection, _Attempt] = {}
        self._hub = Hub(security)
        self._places: Counter[str] = Counter()
        self._next_look_s = 0.0
        self._started_s = 0.0
        # Searches of this turn for a place to give up that found none: the other waiting tasks need not repeat them.
        self._futile: set[bool] = set()
        self._names = Names(self._hub.wake)
        self._thread = threading.Thread(target=self._run, name="kv-handshake-client", daemon=True)
        self._thread.start()

    def call(self, action: Callable[[], None]) -> bool:
        """Run an action on the loop's thread soon; return False if the loop is closed. Callable from any thread."""
        with self._lock:
            if self._is_closing:
                return False
            self._inbox.append(action)
        if threading.current_thread() is not self._thread:
            self._hub.wake()
        return True

    def close(self) -> None:
        """End all tasks with ``closed`` and stop the thread; idempotent."""
        with self._lock:
            self._is_closing = True
        self._hub.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self._names.close()

    # Everything below runs on the loop's thread.

    def start(self, task: Task) -> None:
        """Run a task."""
        self._waiting.append(task)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - nothing may end the thread: every task gets its end
                    self._recover(error)
        finally:
            with self._lock:
                self._is_closing = True
            self._take_in()
            for task in (*self._waiting, *self._under_way):
                now_s = time.monotonic()
                task.fail("closed", f"the client was closed before {task.endpoint} had answered", now_s)
                task.end(now_s)
            self._hub.close()

    def _turn(self) -> None:
        self._take_in()
        self._start_due(time.monotonic())
        for attempt in list(self._by_connection.values()):
            self._send_ahead(attempt)  # asks that came in
        readable, changed = self._hub.poll(0 if self._inbox else self._next_event_s() - time.monotonic())
        for connection in readable:
            self._read(connection)
        for connection in changed:
            self._take_fault(connection)
        self._check_times(time.monotonic())

    def _take_in(self) -> None:
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()

    def _recover(self, error: Exception) -> None:
        """End the running tasks after a failure that was not foreseen, and go on with later ones."""
        self.counts["restarts"] += 1
        self._log.warning("restart", f"the client goes on after {error!r}")
        for attempt in list(self._by_connection.values()):
            problem = f"no reply from {attempt.task.endpoint} because of {error!r}"
            self._fail(attempt, "transport-failed", problem)
        time.sleep(_RECOVERY_S)

    def _start_due(self, now_s: float) -> None:
        """Begin every attempt whose time has come, as far as there are places."""
        self._started_s = now_s
        self._futile.clear()
        for attempt in list(self._under_way.values()):
            if attempt.lookup is not None and attempt.lookup.done():
                addresses, attempt.lookup = attempt.lookup.result(), None
                self._connect(attempt, addresses)
        # Without tasks that give up their places meanwhile: they wait behind all others.
        for task in list(self._waiting):
            endpoint = task.endpoint
            if not task.next_attempt_s <= now_s < task.due_s or not self._make_room(endpoint.host, now_s):
                continue
            self._waiting.remove(task)
            self._places[endpoint.host] += 1
            self.counts["attempts"] += 1
            task.begin_attempt(now_s)
            attempt = self._under_way[task] = _Attempt(task)
            if endpoint.address is not None:
                self._connect(attempt, [endpoint.host])
                continue
            try:
                attempt.lookup = self._names.look_up(endpoint.host)
            except RuntimeError as error:  # no thread can be made
                self._give_up(attempt, error)

    def _give_up(self, attempt: _Attempt, error: Exception) -> None:
        """End an attempt that cannot begin."""
        problem = f"no connection to {attempt.task.endpoint} because of {error!r}"
        self._log.warning("open", problem)
        self._fail(attempt, "transport-failed", problem)

    def _make_room(self, host: str, now_s: float) -> bool:
        """Return whether a host may take another place; end an idle or silent attempt if that is needed.

        The last eighth of the places is shared out: a host takes no more of it than it leaves free. Of 512, one host has at most
        448, the next one at most 32, the one after that 16.
        """
        free, held = self._most - len(self._under_way), self._places[host]
        if free > (self._most // _RESERVE if held > free else 0):
            return True
        return self._displace(now_s, is_new=not held)

    def _displace(self, now_s: float, *, is_new: bool) -> bool:
        """End an attempt without open asks or, for a host without any place, the one silent longest of a host with most places.

        Returns:
            Whether there was one.
        """
        if is_new in self._futile:
            return False
        candidates = [
            each
            for each in self._under_way.values()
            if each.task.is_idle or (is_new and now_s - each.task.heard_s >= _PATIENCE_S)
        ]
        if not candidates:
            self._futile.add(is_new)
            return False

        def worth(attempt: _Attempt) -> tuple[bool, int, bool, float]:
            task, is_open = attempt.task, attempt.connection is not None and attempt.connection.is_open
            return not task.is_idle, -self._places[task.endpoint.host], is_open, task.heard_s

        attempt = min(candidates, key=worth)
        if not attempt.task.is_idle:
            problem = f"no answer from {attempt.task.endpoint} so far, and another peer needs its place here"
            attempt.task.fail("timed-out", problem, now_s)
        self._end(attempt)
        return True

    def _connect(self, attempt: _Attempt, addresses: list[str]) -> None:
        """Connect to the first of the addresses; each attempt begins with the one after the last attempt's first."""
        task = attempt.task
        if not addresses:
            problem = f"the name {task.endpoint.host!r} has no address, or only such as are valid on one link"
            self._fail(attempt, "name-unresolved", problem)
            return
        attempt.addresses.extend(addresses)
        attempt.addresses.rotate(1 - task.attempts)
        self._open(attempt, attempt.addresses.popleft())

    def _open(self, attempt: _Attempt, address: str, tried: tuple[str, ...] = ()) -> None:
        """Open a connection, and send its first queries ahead."""
        try:
            connection = self._hub.open(address, attempt.task.endpoint.port, tried)
        except HandshakeError as error:
            attempt.task.fail_with(error)
            self._end(attempt)
            return
        except Exception as error:  # noqa: BLE001 - one task must not take the others with it
            self._give_up(attempt, error)
            return
        if not self._by_connection:
            self._next_look_s = time.monotonic() + _LOOK_S
        attempt.connection = connection
        self._by_connection[connection] = attempt
        self._send_ahead(attempt)

    def _reconnect(self, attempt: _Attempt, address: str, tried: tuple[str, ...] = ()) -> None:
        self._hang_up(attempt)
        attempt.task.reconnect()
        self._open(attempt, address, tried)

    def _hang_up(self, attempt: _Attempt) -> None:
        connection, attempt.connection = attempt.connection, None
        if connection is not None:
            del self._by_connection[connection]
            self._hub.discard(connection)

    def _send_ahead(self, attempt: _Attempt) -> None:
        """Send what there is to send, and end an attempt that is over."""
        task, connection = attempt.task, attempt.connection
        try:
            while connection is not None and (query := task.next_query(time.monotonic())) is not None:
                connection.send(query)
        except HandshakeError as error:
            task.fail_with(error)
        if task.is_over:
            self._end(attempt)

    def _read(self, connection: Connection) -> bool:
        """Read some replies; return whether there may be more."""
        attempt = self._by_connection.get(connection)
        for _ in range(_READ_AT_ONCE):  # replies that are left wake the next poll
            if attempt is None or attempt.connection is not connection or (frames := connection.receive()) is None:
                return False
            attempt.task.receive(frames, time.monotonic())
            self._send_ahead(attempt)
        return True

    def _take_fault(self, connection: Connection) -> None:
        fault = connection.fault()
        while self._read(connection):  # replies that came before the end of the connection still count
            pass
        attempt = self._by_connection.get(connection)
        if attempt is None:
            return
        if fault == "connection-refused" and attempt.addresses:
            self._reconnect(attempt, attempt.addresses.popleft())
        elif self._hub.may_try_again(connection):
            self._reconnect(attempt, connection.endpoint.host, connection.tried)
        else:
            self._fail(attempt, fault, _FAULTS[fault].format(peer=attempt.task.endpoint))

    def _check_times(self, now_s: float) -> None:
        for task, attempt in list(self._under_way.items()):
            if now_s >= task.due_s:
                task.check_time(now_s)
                if task.is_over:
                    self._end(attempt)
        for task in [task for task in self._waiting if now_s >= task.due_s]:
            task.check_time(now_s)
            if task.is_over:
                self._waiting.remove(task)
                task.end(now_s)
        if self._by_connection and now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            for connection in self._hub.flooded():
                attempt = self._by_connection[connection]
                problem = f"the peer sent more than replies of {MAX_REPLY_BYTES} bytes"
                attempt.task.fail_with(WireError("oversized-reply", problem))
                self._end(attempt)

    def _next_event_s(self) -> float:
        times = [task.due_s for task in self._under_way]
        if any(not attempt.task.is_idle for attempt in self._by_connection.values()):
            times.append(self._next_look_s)
        is_full = len(self._under_way) >= self._most
        for task in self._waiting:
            # A task that was due but got no place waits for another task to end, not for a time.
            is_later = not is_full and task.next_attempt_s > self._started_s
            times.append(task.next_attempt_s if is_later else task.due_s)
        if is_full and self._waiting:
            silent_s = (task.heard_s + _PATIENCE_S for task in self._under_way)
            times += [time_s for time_s in silent_s if time_s > self._started_s]
        return min(times, default=time.monotonic() + _IDLE_POLL_S)

    def _fail(self, attempt: _Attempt, code: str, problem: str) -> None:
        attempt.task.fail(code, problem, time.monotonic())
        self._end(attempt)

    def _end(self, attempt: _Attempt) -> None:
        """End an attempt, and its task unless that waits for another one."""
        task, now_s = attempt.task, time.monotonic()
        self._hang_up(attempt)
        del self._under_way[task]
        self._places[task.endpoint.host] -= 1
        self._places = +self._places  # without hosts that hold none
        if task.plan_retry(now_s, self.random.random()):
            self._waiting.append(task)
        else:
            task.end(now_s)
