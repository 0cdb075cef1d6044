"""A supervised side-channel listener: a thread that serves a `ServerCore` and that no message can stop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, final

from kv_handshake.core.desk import AskDesk
from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.core.pacing import GatedLog, TokenBuckets
from kv_handshake.core.server import ServerCore
from kv_handshake.errors import ConfigurationError, HandshakeError, WireError, require
from kv_handshake.security import ServerSecurity
from kv_handshake.sockets.router import ListeningPort, RouterSocket, TooManyFrames
from kv_handshake.wire.asks import is_ask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_handshake.core.server import Incoming
    from kv_handshake.wire.queries import Rank

__all__ = ["Listener", "QueryLimits"]

_RESTART_FIRST_S = 0.05
_RESTART_MOST_S = 5.0
_JOIN_S = 5.0
_LONGEST_ASK_S = 30.0


@final
@dataclass(frozen=True, slots=True)
class QueryLimits:
    """Rate limit of the queries from one address.

    Many engines can share an address behind a router. So the first queries of every connection, an eighth of `burst`, are
    answered whatever else comes from its address, and do not count. Example: with a burst of 5000 an engine asks for 625 ranks at
    once while its neighbour is refused for asking 100 000 times.

    Attributes:
        queries_per_s: Queries a second on average; 0 for no limit.
        burst: Queries that may come at once: a large engine starting up asks for every rank from every one of its own.
    """

    queries_per_s: float = 1000.0
    burst: float = 5000.0

    def __post_init__(self) -> None:
        require((int, float), queries_per_s=self.queries_per_s, burst=self.burst)


_DEFAULT_LIMITS = QueryLimits()
_SHARES = 8
_TOO_LONG = frozenset({"message-too-long", "messages-too-long"})
_CLOSED: Mapping[str, str] = {
    "message-too-long": "it sends a message without an end, longer than any query",
    "messages-too-long": "all connections together send messages without an end, and it sends the most",
    "idle": "it has asked for nothing for too long",
    "keys-changed": "the list of clients has changed; its engine connects again if it is still on it",
    "too-many-connections": "there are too many, and its address holds the most",
}
"""Why a connection was closed."""


@final
class Listener:
    """Serves one engine's metadata on a TCP port.

    A context manager: entering it starts the listener, leaving it closes it.

    Args:
        host: Address to bind: an IPv4 or IPv6 address, a name, or a wildcard (``0.0.0.0``, ``::``, ``*``).
        port: Port to bind; 0 for any free one, see `port`.
        payloads: Envelope by (pp rank, tp rank) to serve at first.
        splits_blocks: Whether the engine's context ranks hold parts of blocks in turn, which vLLM's own connector cannot read.
        limits: How often one address may ask.
        security: Keys of an encrypted side channel; plain TCP without.
        clock: The monotonic clock that replies carry, in seconds: the one that expiry times on tickets are read from.

    Raises:
        ConfigurationError: ``invalid-endpoint`` or ``invalid-argument``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        payloads: Mapping[Rank, bytes] | None = None,
        splits_blocks: bool = False,
        limits: QueryLimits = _DEFAULT_LIMITS,
        security: ServerSecurity | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        require(QueryLimits, limits=limits)
        require((ServerSecurity, type(None)), security=security)
        require(Callable, clock=clock)
        self._endpoint = endpoint_of(host, port, allows_any_port=True)
        self._security = security
        self._clock = clock
        self._core = ServerCore(payloads, splits_blocks=splits_blocks)
        self._limits = limits
        self._buckets = TokenBuckets(rate_per_s=limits.queries_per_s, burst=limits.burst)
        self._log = GatedLog()
        self._desk: AskDesk | None = None
        self._counts = self._core.counts
        self._closing = threading.Event()
        self._lifecycle = threading.Lock()
        self._socket: RouterSocket | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The bound port; before `start`, the requested one."""
        return self._endpoint.port

    @property
    def is_alive(self) -> bool:
        """Whether the serving thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Bind and serve; a bind failure raises here, at once.

        Raises:
            TransportError: ``bind-failed``.
            ConfigurationError: ``invalid-argument`` if the listener was started or closed before.
        """
        with self._lifecycle:
            if self._thread is not None or self._closing.is_set():
                raise ConfigurationError("invalid-argument", "a listener starts once")
            port = ListeningPort(self._endpoint)
            try:
                self._socket = self._open_socket(port)
            except HandshakeError:
                port.close()
                raise
            self._endpoint = replace(self._endpoint, port=port.endpoint.port)
            self._thread = threading.Thread(
                target=self._supervise, args=(port,), name="kv-handshake-listener", daemon=True
            )
            self._thread.start()

    def replace(self, payloads: Mapping[Rank, bytes]) -> None:
        """Serve these envelopes by (pp rank, tp rank) from now on; an empty mapping means "not ready"."""
        self._core.replace(payloads)

    def take_asks(
        self, on_ask: Callable[[int, bytes], None], on_gone: Callable[[int], None], *, wait_s: float = 5.0
    ) -> None:
        """Accept asks from peers; call this before `start`. Without it, asks are refused as an unknown command.

        Args:
            on_ask: Called with (ask id, payload) on the listener's thread: it must not block. `answer` sends the answer.
            on_gone: Called in the same way with the id of an ask whose asker no longer waits.
            wait_s: Seconds after which an ask without an answer is refused, at most 30.

        Raises:
            ConfigurationError: ``invalid-argument``.
        """
        require(Callable, on_ask=on_ask, on_gone=on_gone)
        require((int, float), wait_s=wait_s)
        if not 0 < wait_s <= _LONGEST_ASK_S:
            raise ConfigurationError(
                "invalid-argument", f"asks would wait {wait_s} s; it must be above 0 and at most 30"
            )
        self._desk = AskDesk(on_ask, on_gone, wait_s=wait_s, log=self._log, counts=self._counts)

    def answer(self, ask_id: int, payload: bytes) -> None:
        """Send the answer to an ask, or drop it if the ask has ended. Callable from any thread, also in `on_ask`.

        Args:
            ask_id: The id that `on_ask` was given.
            payload: At most `MAX_ASK_REPLY_BYTES`, 1 MiB.

        Raises:
            ConfigurationError: ``invalid-argument`` for a payload that is too long.
        """
        require(int, ask_id=ask_id)
        require(bytes, payload=payload)
        if self._desk is not None and self._desk.put(ask_id, payload):
            self._wake()

    def statistics(self) -> Mapping[str, int]:
        """Return the counts so far.

        They are ``answered``, ``refused.<code>`` by code, ``unsent`` (the asker was gone or did not read), ``restarts``,
        ``connections_closed.<cause>`` (``message-too-long``, ``messages-too-long``, ``idle``,
        ``too-many-connections``, ``keys-changed``), ``log_lines_held_back``, and for an encrypted channel ``clients_refused`` in
        all and ``clients_refused.<address> <key>`` one by one. A listener that takes asks has ``asks``, ``asks_open``,
        ``asks_answered``, ``asks_cancelled`` and ``asks_lost`` (refused after `ask_wait_s`, or their connection ended) besides.
        """
        sock, desk = self._socket, self._desk
        denied: Mapping[str, int] = sock.denied() if sock is not None else {}
        names = ("asks", "asks_answered", "asks_cancelled", "asks_lost") if desk is not None else ()
        return {
            **dict.fromkeys(("answered", "unsent", "restarts", *names), 0),
            **self._counts,
            **({"asks_open": desk.asks_open} if desk is not None else {}),
            "log_lines_held_back": self._log.held_back,
            "clients_refused": sum(denied.values()),
            **{f"clients_refused.{client}": count for client, count in denied.items()},
        }

    def close(self) -> None:
        """Stop serving and free the port; idempotent."""
        self._closing.set()
        with self._lifecycle:
            if self._thread is None:
                return
            if self._socket is not None:
                self._socket.wake()
            if threading.current_thread() is not self._thread:
                self._thread.join(_JOIN_S)

    def _supervise(self, port: ListeningPort) -> None:
        """Serve until closed; an early end of the loop is counted, logged, and followed by a fresh socket."""
        with contextlib.closing(port):
            failures = 0
            while not self._closing.is_set():
                began_s = time.monotonic()
                try:
                    if self._socket is None:
                        self._socket = self._open_socket(port)
                    self._serve(self._socket)
                    if self._socket.is_outdated:
                        failures = -1  # a rotation, which must not make clients wait
                except TooManyFrames as message:
                    self._counts["refused.wrong-frames"] += 1
                    self._log.warning(
                        "frames", f"{message} sent a message of too many frames; all connections are closed"
                    )
                    failures = -1  # caused by one peer, which must not make others wait
                except Exception as error:  # noqa: BLE001 - the supervisor's purpose: nothing may end the listener
                    self._counts["restarts"] += 1
                    failures = failures + 1 if time.monotonic() - began_s < _RESTART_MOST_S else 1
                    self._log.warning("restart", f"listener on port {self.port} restarts after {error!r}")
                finally:
                    self._drop_socket()
                if failures >= 0 and not self._closing.is_set():
                    self._closing.wait(min(_RESTART_MOST_S, _RESTART_FIRST_S * 2.0 ** min(failures, 20)))
                failures = max(0, failures)

    def _open_socket(self, port: ListeningPort) -> RouterSocket:
        return RouterSocket(port, security=self._security, report=self._hung_up, closed=self._connection_ended)

    def _connection_ended(self, descriptor: int) -> None:
        if self._desk is not None and self._desk.connection_ended(descriptor):
            self._wake()

    def _wake(self) -> None:
        """Wake the listener's thread to look at its desk; it looks before each wait, so it need not wake itself."""
        sock = self._socket
        if sock is not None and threading.current_thread() is not self._thread:
            sock.wake()

    def _serve(self, sock: RouterSocket) -> None:
        while not self._closing.is_set() and not sock.is_outdated:
            if self._desk is not None:
                for envelope, frames in self._desk.take_replies(time.monotonic()):
                    if not sock.send(envelope, frames, is_shared=False):
                        self._counts["unsent"] += 1
            incoming = sock.receive()
            if incoming is not None and (reply := self._reply(incoming)) and not sock.send(incoming.envelope, reply):
                self._counts["unsent"] += 1

    def _reply(self, incoming: Incoming) -> tuple[bytes, ...]:
        """Return the frames of the reply, none for an ask that stays open."""
        now_s, sender, wait_s = self._clock(), incoming.sender, 0.0
        if sender.queries > self._limits.burst / _SHARES or incoming.surplus:
            cost = min(1.0 + incoming.surplus, self._limits.burst)  # a debt of seconds, not of minutes
            wait_s = self._buckets.wait_s(sender.address, now_s, cost)
        if self._desk is not None and incoming.query is not None and is_ask(incoming.query):
            try:
                return self._desk.receive(incoming, incoming.query, time.monotonic(), wait_s=wait_s)
            except WireError as error:
                return self._core.refuse(error.code, error.message)
        if wait_s:
            rate = f"{self._limits.queries_per_s:g} times a second"
            self._log.warning("rate-limited", f"{sender.address} asks more often than {rate}; it must wait")
            return self._core.respond(incoming.query or b"", clock_s=now_s, wait_s=wait_s)
        if incoming.query is None:
            self._log.warning("wrong-frames", f"{sender.address} sent a message that is not a query")
            return self._core.refuse("wrong-frames")
        if sender.is_req and (unreadable := self._core.unreadable):
            code, cause = unreadable
            self._log.warning(
                code,
                f"{sender.address} asks as vLLM's own connector does, so it is refused ({code}), and its requests fail there or "
                f"are computed there: {cause}",
            )
        return self._core.respond(incoming.query, clock_s=now_s, reads_one_stage=sender.is_req)

    def _hung_up(self, cause: str, address: str) -> None:
        """Count a connection that was shut down, or log trouble with key files or limits; runs on the watch's thread."""
        if cause in {"keys", "watch"}:
            self._log.warning(cause, address)
            return
        self._counts[f"connections_closed.{cause}"] += 1
        if cause in _TOO_LONG:
            self._counts["refused.wrong-frames"] += 1
        self._log.warning(cause, f"a connection of {address} was closed: {_CLOSED.get(cause, cause)}")

    def _drop_socket(self) -> None:
        sock, self._socket = self._socket, None
        if self._desk is not None:
            self._desk.drop_all()
        if sock is not None:
            self._security = sock.security  # the latest keys of the files, also after a failure
            sock.close()
