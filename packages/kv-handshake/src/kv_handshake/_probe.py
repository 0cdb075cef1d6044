"""Asking a live listener once, by hand: the frames themselves are kept, and nothing is retried."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_handshake._advertisement import Advertisement, decode_advertisement
from kv_handshake._errors import TransportError, WireError
from kv_handshake._policy import LocalOffer
from kv_handshake._queries import ADVERTISEMENT_QUERY
from kv_handshake._reading import decode_envelope
from kv_handshake._recording import Recording
from kv_handshake._session import ClientSession
from kv_handshake._zmq import Hub

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake._keys import ClientSecurity
    from kv_handshake._messages import AgentMetadata
    from kv_handshake._queries import Rank
    from kv_handshake._zmq import Connection

__all__ = ["ProbeResult", "probe", "probe_advertisement"]


@final
@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a listener answered.

    Attributes:
        recording: The frames, ready to be written to a file.
        peers: The opened metadata by (pp, tp) rank.
        rtts_s: Round trip of each rank's query, seconds.
        connect_s: From the start to the first reply, seconds.
        clock_offset_s: Peer's clock minus ours, seconds; None in old dialects.
    """

    recording: Recording
    peers: Mapping[Rank, AgentMetadata]
    rtts_s: Mapping[Rank, float]
    connect_s: float
    clock_offset_s: float | None


def probe(
    host: str,
    port: int,
    *,
    ranks: Sequence[Rank],
    dialect: int,
    timeout_s: float,
    security: ClientSecurity | None = None,
) -> ProbeResult:
    """Ask a listener for some ranks, one after the other, without judging what it is.

    Raises:
        TransportError: ``name-unresolved``, ``timed-out``, ``connection-refused``, ``connection-lost``,
            ``authentication-refused``.
        WireError: Whatever is wrong with a reply; ``refused`` for a refusal.
    """
    session = ClientSession(ranks=ranks, version=dialect, offer=LocalOffer(policy="off"))
    payloads: dict[Rank, bytes] = {}
    rtts_s: dict[Rank, float] = {}
    began_s = time.perf_counter()
    connect_s = 0.0
    with closing(Hub(security)) as hub:
        connection = hub.open(_first_address(host), port)
        for rank in ranks:
            sent_s = time.perf_counter()
            connection.send(session.next_query(now_s=sent_s))
            frames = _await_reply(hub, connection, f"{host} port {port}, rank {rank}", timeout_s)
            rtts_s[rank] = time.perf_counter() - sent_s
            connect_s = connect_s or time.perf_counter() - began_s
            session.receive_message(frames, now_s=time.perf_counter())
            if session.error is not None:
                raise session.error
            payloads[rank] = frames[0]
    factors = decode_envelope(next(iter(payloads.values()))).factors
    return ProbeResult(
        Recording(dialect, payloads, factors=factors), session.peers, rtts_s, connect_s, session.clock_offset_s
    )


def probe_advertisement(
    host: str, port: int, *, timeout_s: float, security: ClientSecurity | None = None
) -> tuple[Advertisement, bytes]:
    """Ask one of our own listeners for its advertisement; return it with its bytes.

    Never point this at vLLM's own listener: it would end it.

    Raises:
        TransportError: As `probe`.
        WireError: ``malformed-advertisement``, or ``refused`` if the engine has none.
    """
    with closing(Hub(security)) as hub:
        connection = hub.open(_first_address(host), port)
        connection.send(ADVERTISEMENT_QUERY)
        data = _await_reply(hub, connection, f"{host} port {port}", timeout_s)[0]
    if not data.startswith(b"{"):
        refusal = decode_envelope(data).refusal
        raise WireError("refused", f"the peer refused: {refusal.code if refusal else 'no advertisement in its reply'}")
    return decode_advertisement(data), data


def _await_reply(hub: Hub, connection: Connection, whom: str, timeout_s: float) -> list[bytes]:
    began_s = time.monotonic()
    while (elapsed_s := time.monotonic() - began_s) < timeout_s:
        hub.poll(timeout_s - elapsed_s)
        fault = connection.fault()  # before the reply, so that a reply before the end of the connection counts
        frames = connection.receive()
        if frames is not None:
            if not frames:
                raise WireError("unexpected-reply", f"an empty reply from {whom}")
            return frames
        if fault:
            raise TransportError(fault, f"{fault.replace('-', ' ')}: {whom}, after {elapsed_s:.2f} s")
    raise TransportError("timed-out", f"no reply from {whom} after {timeout_s:.2f} s")


def _first_address(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError("name-unresolved", f"no address for {host!r}: {error}", host=host) from error
    # A name often has both kinds of address while vLLM binds only IPv4.
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
