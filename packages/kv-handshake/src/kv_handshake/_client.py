"""A client that talks to many listeners at once, on one thread.

Every peer has its own connection and its own times, and the thread never waits for a single one of them: host names
are looked up on other threads, connecting is asynchronous, and one poll covers all connections. So a peer that is
dead, slow or hostile delays nobody else.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, final

from kv_handshake._endpoint import check_endpoint, is_literal_address
from kv_handshake._errors import ConfigurationError, HandshakeError, TransportError
from kv_handshake._log import GatedLog
from kv_handshake._outcome import Outcome, Timing
from kv_handshake._pacing import Backoff, FailureMemory
from kv_handshake._session import SessionMemory
from kv_handshake._task import Request, Task
from kv_handshake._zmq import Connection, Hub

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_handshake._keys import ClientSecurity
    from kv_handshake._policy import LocalOffer
    from kv_handshake._queries import Rank

__all__ = ["Client"]

_RESOLVERS = 4
_IDLE_POLL_S = 60.0
_JOIN_S = 5.0
_RECOVERY_S = 0.02


@final
class Client:
    """Performs handshakes with many peers concurrently from one thread of its own.

    Args:
        offer: This engine's side of every comparison: its factors and how strictly it takes differences.
        timing: Deadlines, retries and limits.
        security: Keys of an encrypted side channel; plain TCP without.
        seed: Seed of the jitter, for reproducible tests.
    """

    def __init__(
        self,
        offer: LocalOffer,
        *,
        timing: Timing | None = None,
        security: ClientSecurity | None = None,
        seed: int | None = None,
    ) -> None:
        self._offer = offer
        self._timing = timing or Timing()
        self._random = random.Random(seed)  # noqa: S311 - jitter, not secrets
        self._memory = FailureMemory(Backoff(self._timing.hold_first_s, self._timing.hold_most_s))
        self._shared = SessionMemory(offer)  # used on the client's thread only
        self._log = GatedLog()
        self._counts = {"requests": 0, "succeeded": 0, "failed": 0, "attempts": 0, "callback_errors": 0, "restarts": 0}
        self._lock = threading.Lock()
        self._inbox: deque[Task] = deque()
        self._is_closing = False
        self._waiting: deque[Task] = deque()
        self._lookups: dict[Task, Future[list[str]]] = {}
        self._running: dict[Connection, Task] = {}
        self._hub = Hub(security)
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="kv-handshake-names")
        self._thread = threading.Thread(target=self._run, name="kv-handshake-client", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Client(policy={self._offer.policy!r}, running={len(self._running)}, waiting={len(self._waiting)})"

    def request(
        self,
        *,
        host: str,
        port: int,
        ranks: Sequence[Rank],
        engine_id: str,
        dialect: int,
        on_done: Callable[[Outcome], None],
        generation: int | None = None,
    ) -> None:
        """Start a handshake and return at once; `on_done` runs on the client's thread exactly once.

        Args:
            host: The listener's address or name.
            port: The listener's port.
            ranks: (pp, tp) ranks to ask for.
            engine_id: The engine that must answer; empty if any may.
            dialect: The peer's connector version, 2 to 15.
            on_done: Gets the outcome; it must not block, and an exception that it raises is logged and counted.
            generation: The registration generation that the ticket was made with; None to accept any.

        Raises:
            ConfigurationError: ``invalid-endpoint``, ``invalid-argument`` or ``unknown-dialect``, before anything is
                sent; ``invalid-argument`` also after `close`.
        """
        check_endpoint(host, port)
        request = Request(host, port, tuple(ranks), engine_id, dialect, generation, on_done)
        task = Task(request, offer=self._offer, timing=self._timing, now_s=time.monotonic(), memory=self._shared)
        with self._lock:
            if self._is_closing:
                raise ConfigurationError("invalid-argument", "the client is closed")
            self._inbox.append(task)
            self._counts["requests"] += 1
        self._hub.wake()

    def fetch(
        self,
        *,
        host: str,
        port: int,
        ranks: Sequence[Rank],
        engine_id: str = "",
        dialect: int,
        generation: int | None = None,
    ) -> Outcome:
        """Perform one handshake and wait for its outcome; not for use in `on_done`.

        Raises:
            ConfigurationError: As `request`.
        """
        box: list[Outcome] = []
        is_done = threading.Event()

        def keep(outcome: Outcome) -> None:
            box.append(outcome)
            is_done.set()

        self.request(
            host=host,
            port=port,
            ranks=ranks,
            engine_id=engine_id,
            dialect=dialect,
            on_done=keep,
            generation=generation,
        )
        is_done.wait()
        return box[0]

    def statistics(self) -> Mapping[str, int]:
        """Return the counts so far.

        They are ``requests``, ``succeeded``, ``failed``, ``attempts`` (connections tried), ``callback_errors``,
        ``restarts`` (failures of the thread that nobody foresaw), ``remembered_failures`` (questions that are not asked
        for a while) and ``log_lines_held_back``.
        """
        with self._lock:
            counts = dict(self._counts)
        return {**counts, "remembered_failures": len(self._memory), "log_lines_held_back": self._log.held_back}

    def close(self) -> None:
        """End all handshakes with the outcome ``closed`` and stop the thread; idempotent."""
        with self._lock:
            self._is_closing = True
        self._hub.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    # Everything below runs on the client's thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - nothing may end the thread: every request gets its outcome
                    self._recover(error)
        finally:
            with self._lock:
                self._is_closing = True
                leftover = list(self._inbox)
            for task in (*leftover, *self._waiting, *self._lookups, *self._running.values()):
                problem = "the client was closed while waiting for metadata"
                task.session.fail(task.transport_error("closed", problem, time.monotonic()))
                self._finish(task, remembers=False)
            self._hub.close()

    def _turn(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            arrived, self._inbox = self._inbox, deque()
        for task in arrived:
            self._admit(task, now_s)
        self._start_due(now_s)
        readable, faulty = self._hub.poll(self._next_deadline_s() - time.monotonic())
        for connection in readable:
            self._read(connection)
        for connection in faulty:
            self._take_fault(connection)
        self._check_times(time.monotonic())

    def _recover(self, error: Exception) -> None:
        """End what is under way after a failure that nobody foresaw, and go on with what comes."""
        with self._lock:
            self._counts["restarts"] += 1
        self._log.warning("restart", f"the client goes on after {error!r}")
        for connection, task in list(self._running.items()):
            problem = f"no reply because of {error!r}"
            task.session.fail(task.transport_error("transport-failed", problem, time.monotonic()))
            self._hang_up(connection, task)
        time.sleep(_RECOVERY_S)

    def _admit(self, task: Task, now_s: float) -> None:
        remembered = self._memory.blocking(task.request.peer, now_s)
        if remembered is None:
            self._waiting.append(task)
            return
        task.session.fail(
            TransportError(
                "recently-failed",
                f"{task.request.host} port {task.request.port} failed {remembered.failures} times, is asked again in "
                f"{remembered.until_s - now_s:.2f} s; last: {remembered.code}: {remembered.message}",
                last_code=remembered.code,
                failures=remembered.failures,
                retry_after_s=remembered.until_s - now_s,
            )
        )
        self._finish(task, remembers=False)

    def _start_due(self, now_s: float) -> None:
        """Begin every attempt whose time has come, as far as there are places."""
        for task, lookup in list(self._lookups.items()):
            if lookup.done():
                del self._lookups[task]
                self._connect(task, lookup.result())
        for _ in range(len(self._waiting)):
            task = self._waiting.popleft()
            has_place = len(self._running) + len(self._lookups) < self._timing.connections
            if not has_place or now_s < task.next_attempt_s:
                self._waiting.append(task)
                continue
            task.begin_attempt(now_s)
            with self._lock:
                self._counts["attempts"] += 1
            if is_literal_address(task.request.host):
                self._connect(task, [task.request.host])
            else:
                lookup = self._resolvers.submit(_addresses_of, task.request.host)
                self._lookups[task] = lookup
                lookup.add_done_callback(lambda _: self._hub.wake())

    def _connect(self, task: Task, addresses: list[str]) -> None:
        now_s = time.monotonic()
        if task.session.is_over:
            self._end_attempt(task)
            return
        if not addresses:
            error = task.transport_error("name-unresolved", f"no address for the name {task.request.host!r}:", now_s)
            task.session.fail(error)
            self._end_attempt(task)
            return
        try:
            # One address per attempt, in turn: a name may have some that do not answer.
            connection = self._hub.open(addresses[(task.attempts - 1) % len(addresses)], task.request.port)
        except HandshakeError as error:
            task.session.fail(error)
            self._end_attempt(task)
            return
        self._running[connection] = task
        self._send_ahead(connection, task)
        self._settle(connection, task)

    def _settle(self, connection: Connection, task: Task) -> None:
        """Hang up if the session is over."""
        if task.session.is_over:
            self._hang_up(connection, task)

    def _send_ahead(self, connection: Connection, task: Task) -> None:
        session = task.session
        try:
            while session.queries_left and len(session.missing_ranks) - session.queries_left < self._timing.pipeline:
                connection.send(session.next_query(now_s=time.perf_counter()))
        except HandshakeError as error:
            session.fail(error)

    def _read(self, connection: Connection) -> None:
        task = self._running[connection]
        while not task.session.is_over and (frames := connection.receive()) is not None:
            task.session.receive_message(frames, now_s=time.perf_counter())
            task.extend_patience(time.monotonic())
            self._send_ahead(connection, task)
        self._settle(connection, task)

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
        problems = {
            "connection-refused": "no connection",
            "connection-lost": "the connection ended before a reply",
            "authentication-refused": "wrong keys, encryption on one side only, or no ZeroMQ: no connection",
        }
        task.session.fail(task.transport_error(fault, problems[fault], time.monotonic()))
        self._hang_up(connection, task)

    def _hang_up(self, connection: Connection, task: Task) -> None:
        """Tell the caller first, then tidy up."""
        del self._running[connection]
        self._end_attempt(task)
        self._hub.discard(connection)

    def _check_times(self, now_s: float) -> None:
        for connection, task in list(self._running.items()):
            task.check_time(now_s)
            self._settle(connection, task)
        for task in list(self._lookups):
            task.check_time(now_s)
            if task.session.is_over:
                self._lookups.pop(task).cancel()
                self._end_attempt(task)
        for task in [task for task in self._waiting if now_s >= task.deadline_s]:
            self._waiting.remove(task)
            task.session.fail(task.transport_error("timed-out", "no place for a connection", now_s))
            self._finish(task, remembers=task.attempts > 0)  # one that waited for its next attempt has failed

    def _next_deadline_s(self) -> float:
        times = [task.patience_s for task in (*self._running.values(), *self._lookups)]
        if len(self._running) + len(self._lookups) < self._timing.connections:
            times += [task.next_attempt_s for task in self._waiting]
        else:
            times += [task.deadline_s for task in self._waiting]
        return min(times, default=time.monotonic() + _IDLE_POLL_S)

    def _end_attempt(self, task: Task) -> None:
        if task.plan_retry(time.monotonic(), self._random.random()):
            self._waiting.append(task)
        else:
            self._finish(task, remembers=True)

    def _finish(self, task: Task, *, remembers: bool) -> None:
        now_s = time.monotonic()
        outcome = task.outcome(now_s)
        peer = task.request.peer
        if outcome.is_ok:
            self._memory.forget(peer)
            for text in outcome.verdict.warnings:
                self._log.warning(f"accepted {peer}", f"peer {peer}: {text}")
        elif remembers:
            self._memory.record(
                peer, code=outcome.code, message=outcome.message, now_s=now_s, chance=self._random.random()
            )
        with self._lock:
            self._counts["succeeded" if outcome.is_ok else "failed"] += 1
        try:
            task.request.on_done(outcome)
        except Exception as error:  # noqa: BLE001 - a caller's mistake must not end everybody's handshakes
            with self._lock:
                self._counts["callback_errors"] += 1
            self._log.warning("callback", f"on_done of a handshake with {peer} raised {error!r}")


def _addresses_of(host: str) -> list[str]:
    """Return the addresses of a name, IPv4 and IPv6 in the resolver's order; none if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))
