"""The client loop: many requests at once, on one thread.

Every request has its own connection and its own times, and the thread never waits for a single one of them: host names
are looked up on other threads, connecting is asynchronous, and one poll covers all connections. So a peer that is
dead, slow or hostile delays no other request. `Client` and `probe` both run their requests here.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, final

from kv_handshake.errors import HandshakeError, WireError
from kv_handshake.sockets import NOTHING_TRIED, Connection, Hub, Tried, most_connections
from kv_handshake.sockets.names import Names
from kv_handshake.wire.limits import MAX_REPLY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from kv_handshake.core.attempt import Task, Timing
    from kv_handshake.core.pacing import GatedLog
    from kv_handshake.sockets import ClientSecurity

__all__ = ["Loop"]

_IDLE_POLL_S = 60.0
_JOIN_S = 5.0
_RECOVERY_S = 0.02
_LOOK_S = 0.02
"""Time between two looks at how much has come in on open connections; most handshakes end before the first."""

_RESERVE = 8
_PATIENCE_S = 0.5
"""A look-up or an attempt that has been silent for so long gives up its place if a host without any place needs it."""


@final
class Loop:
    """Runs tasks from one thread of its own until they end.

    Args:
        timing: Limits of connections and of queries under way.
        security: Keys of an encrypted side channel; plain TCP without.
        seed: Seed of the jitter, for reproducible tests.
        log: Gets failures of the loop itself.
        allows_link_local_names: Whether a host's name may resolve to an address of one link only.
    """

    def __init__(
        self,
        timing: Timing,
        log: GatedLog,
        *,
        security: ClientSecurity | None,
        seed: int | None,
        allows_link_local_names: bool = True,
    ) -> None:
        self._timing = timing
        self._connections = most_connections(timing.connections)
        self._log = log
        self._random = random.Random(seed)  # noqa: S311 - jitter, not secrets
        self._counts = {"attempts": 0, "restarts": 0}
        self._lock = threading.Lock()
        self._inbox: deque[Task] = deque()
        self._is_closing = False
        self._waiting: deque[Task] = deque()
        self._lookups: dict[Task, Future[list[str]]] = {}
        self._running: dict[Connection, Task] = {}
        self._hub = Hub(security)
        self._places: Counter[str] = Counter()
        self._next_look_s = 0.0
        self._started_s = 0.0
        # Time at which no task was silent, so that the other waiting tasks need not look again in the same turn.
        self._all_heard_s = 0.0
        self._names = Names(self._hub.wake, allows_link_local=allows_link_local_names)
        self._thread = threading.Thread(target=self._run, name="kv-handshake-client", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Loop(running={len(self._running)}, waiting={len(self._waiting)})"

    def submit(self, task: Task) -> bool:
        """Run a task; return False if the loop is closed. Callable from any thread."""
        with self._lock:
            if self._is_closing:
                return False
            self._inbox.append(task)
        if threading.current_thread() is not self._thread:
            self._hub.wake()
        return True

    def chance(self) -> float:
        """Return a random number in [0, 1) for jitter."""
        return self._random.random()

    def statistics(self) -> Mapping[str, int]:
        """Return the counts so far: ``attempts`` and ``restarts``."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """End all tasks with ``closed`` and stop the thread; idempotent."""
        with self._lock:
            self._is_closing = True
        self._hub.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self._names.close()

    # Everything below runs on the loop's thread.

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
                leftover = list(self._inbox)
            for task in (*leftover, *self._waiting, *self._lookups, *self._running.values()):
                now_s = time.monotonic()
                task.session.fail(
                    task.transport_error("closed", f"the client was closed before {task.peer} had answered", now_s)
                )
                task.on_end(task)
            self._hub.close()

    def _turn(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            arrived, self._inbox = self._inbox, deque()
        for task in arrived:
            error = task.admit(now_s) if task.admit is not None else None
            if error is None:
                self._waiting.append(task)
            else:
                task.session.fail(error)
                task.on_end(task)
        self._start_due(now_s)
        with self._lock:
            has_work = bool(self._inbox)
        readable, changed = self._hub.poll(0 if has_work else self._next_event_s() - time.monotonic())
        for connection in readable:
            self._read(connection)
        for connection in changed:
            self._take_fault(connection)
        self._check_times(time.monotonic())

    def _recover(self, error: Exception) -> None:
        """End the running tasks after a failure that was not foreseen, and go on with later ones."""
        with self._lock:
            self._counts["restarts"] += 1
        self._log.warning("restart", f"the client goes on after {error!r}")
        for connection, task in list(self._running.items()):
            now_s = time.monotonic()
            task.session.fail(
                task.transport_error("transport-failed", f"no reply from {task.peer} because of {error!r}", now_s)
            )
            self._hang_up(connection, task)
        time.sleep(_RECOVERY_S)

    def _start_due(self, now_s: float) -> None:
        """Begin every attempt whose time has come, as far as there are places."""
        self._started_s = now_s
        for task, lookup in list(self._lookups.items()):
            if lookup.done():
                del self._lookups[task]
                self._begin(task, lookup.result())
        for task in list(
            self._waiting
        ):  # without tasks that give up their places meanwhile: they wait behind all others
            is_due = task.next_attempt_s <= now_s < task.deadline_s
            if not is_due or not self._make_room(task.request.endpoint.host, now_s):
                continue
            self._waiting.remove(task)
            self._places[task.request.endpoint.host] += 1
            task.begin_attempt(now_s)
            with self._lock:
                self._counts["attempts"] += 1
            endpoint = task.request.endpoint
            if endpoint.address is not None:
                self._begin(task, [endpoint.host])
            else:
                self._look_up(task)

    def _look_up(self, task: Task) -> None:
        try:
            self._lookups[task] = self._names.look_up(task.request.endpoint.host)
        except RuntimeError as error:  # no thread can be made
            self._give_up(task, error)

    def _give_up(self, task: Task, error: Exception) -> None:
        """End an attempt that cannot begin: its task is in no list, and every task gets its end."""
        self._log.warning("open", f"no connection to {task.peer} because of {error!r}")
        now_s = time.monotonic()
        task.session.fail(
            task.transport_error("transport-failed", f"no connection to {task.peer} because of {error!r}", now_s)
        )
        self._end_attempt(task)

    def _make_room(self, host: str, now_s: float) -> bool:
        """Return whether a host may take another place; for a host that has none, end a silent attempt of another host.

        The last eighth of the places is shared out: a host takes no more of it than it leaves free. Of 512, one host has at most
        448, the next one at most 32, the one after that 16.
        """
        free = self._connections - len(self._running) - len(self._lookups)
        if self._places[host]:
            return free > self._connections // _RESERVE or self._places[host] <= free
        return free > 0 or self._displace(now_s)

    def _displace(self, now_s: float) -> bool:
        """End the look-up or attempt that has been silent longest, of a host with most places; return False if none is silent."""
        if now_s == self._all_heard_s:
            return False
        running = [(task, connection.is_open, connection) for connection, task in self._running.items()]
        looked_up = [(task, False, None) for task in self._lookups]
        task, _, connection = min(
            (each for each in (*running, *looked_up) if now_s - each[0].heard_s >= _PATIENCE_S),
            key=lambda each: (-self._places[each[0].request.endpoint.host], each[1], each[0].heard_s),
            default=(None, False, None),
        )
        if task is None:
            self._all_heard_s = now_s
            return False
        task.session.fail(
            task.transport_error(
                "timed-out", f"no answer from {task.peer} so far, and another peer needs its place here", now_s
            )
        )
        if connection is not None:
            self._hang_up(connection, task)
        else:
            del self._lookups[task]
            self._end_attempt(task)
        return True

    def _begin(self, task: Task, addresses: list[str]) -> None:
        """Connect to the first of the addresses."""
        if not addresses and not task.session.is_over:
            now_s, host = time.monotonic(), task.request.endpoint.host
            task.session.fail(
                task.transport_error(
                    "name-unresolved", f"the name {host!r} has no address, or only such as are valid on one link", now_s
                )
            )
        task.set_addresses(addresses)
        self._connect(task)

    def _connect(self, task: Task) -> None:
        """Open a connection to the task's next address, and send its first queries ahead."""
        address = task.next_address()
        if task.session.is_over or address is None:
            self._end_attempt(task)
            return
        self._open(task, address)

    def _open(self, task: Task, address: str, tried: Tried = NOTHING_TRIED) -> None:
        try:
            connection = self._hub.open(address, task.request.endpoint.port, tried)
        except HandshakeError as error:
            task.session.fail(error)
            self._end_attempt(task)
            return
        except Exception as error:  # noqa: BLE001 - one request must not take the others with it
            self._give_up(task, error)
            return
        if not self._running:
            self._next_look_s = time.monotonic() + _LOOK_S
        self._running[connection] = task
        self._send_ahead(connection, task)
        self._hang_up_if_over(connection, task)

    def _hang_up_if_over(self, connection: Connection, task: Task) -> None:
        if task.session.is_over:
            self._hang_up(connection, task)

    def _send_ahead(self, connection: Connection, task: Task) -> None:
        session = task.session
        try:
            while session.queries_left and session.queries_outstanding < self._timing.pipeline:
                connection.send(session.next_query(now_s=time.perf_counter()))
        except HandshakeError as error:
            session.fail(error)

    def _read(self, connection: Connection) -> None:
        task = self._running[connection]
        while not task.session.is_over and (frames := connection.receive()) is not None:
            task.session.receive_message(frames, now_s=time.perf_counter())
            task.extend_attempt(time.monotonic())
            self._send_ahead(connection, task)
        self._hang_up_if_over(connection, task)

    def _take_fault(self, connection: Connection) -> None:
        if connection not in self._running:
            return
        fault = connection.fault()
        if not fault:
            return
        self._read(connection)  # replies that came before the end of the connection still count
        task = self._running.get(connection)
        if task is None:
            return
        if fault == "connection-refused" and task.change_address():
            del self._running[connection]
            self._hub.discard(connection)
            self._connect(task)
            return
        tried = self._hub.next_try(connection)
        if tried is not None:
            task.change_key()
            del self._running[connection]
            self._hub.discard(connection)
            self._open(task, connection.address, tried)
            return
        task.session.fail(task.connection_error(fault, time.monotonic()))
        self._hang_up(connection, task)

    def _hang_up(self, connection: Connection, task: Task) -> None:
        """Tell the caller first, then close the connection."""
        del self._running[connection]
        self._end_attempt(task)
        self._hub.discard(connection)

    def _check_times(self, now_s: float) -> None:
        for connection, task in list(self._running.items()):
            task.check_time(now_s)
            self._hang_up_if_over(connection, task)
        for task in list(self._lookups):
            task.check_time(now_s)
            if task.session.is_over:
                del self._lookups[task]
                self._end_attempt(task)
        if self._running and now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._end_flooded()
        for task in [task for task in self._waiting if now_s >= task.deadline_s]:
            self._waiting.remove(task)
            if task.attempts:
                error = task.transport_error("timed-out", f"no metadata from {task.peer} in time", now_s)
            else:
                error = task.transport_error(
                    "too-many-peers", f"no place in this process for a connection to {task.peer}", now_s
                )
            task.session.fail(error)
            task.on_end(task)

    def _end_flooded(self) -> None:
        for connection in self._hub.flooded():
            task = self._running.get(connection)
            if task is not None:
                task.session.fail(
                    WireError("oversized-reply", f"the peer sent more than replies of {MAX_REPLY_BYTES} bytes")
                )
                self._hang_up(connection, task)

    def _next_event_s(self) -> float:
        return min(self._next_deadline_s(), self._next_look_s) if self._running else self._next_deadline_s()

    def _next_deadline_s(self) -> float:
        times = [task.attempt_deadline_s for task in (*self._running.values(), *self._lookups)]
        if len(self._running) + len(self._lookups) < self._connections:
            # A task that was due but got no place waits for another task to end, not for a time.
            times += [
                task.next_attempt_s if task.next_attempt_s > self._started_s else task.deadline_s
                for task in self._waiting
            ]
        else:
            times += [task.deadline_s for task in self._waiting]
            silent_s = (task.heard_s + _PATIENCE_S for task in self._lookups) if self._waiting else ()
            times += [time_s for time_s in silent_s if time_s > self._started_s]
        return min(times, default=time.monotonic() + _IDLE_POLL_S)

    def _end_attempt(self, task: Task) -> None:
        host = task.request.endpoint.host
        self._places[host] -= 1
        if self._places[host] <= 0:
            del self._places[host]
        if task.plan_retry(time.monotonic(), self._random.random()):
            self._waiting.append(task)
        else:
            task.on_end(task)
