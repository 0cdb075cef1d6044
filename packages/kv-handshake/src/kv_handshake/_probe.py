"""Asking a live listener once, by hand: its frames are kept, and nothing is retried."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_handshake._endpoint import endpoint_of
from kv_handshake._errors import ConfigurationError
from kv_handshake._log import GatedLog
from kv_handshake._loop import Loop
from kv_handshake._policy import LocalOffer
from kv_handshake._reading import decode_envelope
from kv_handshake._recording import Recording
from kv_handshake._task import HandshakeRequest, Question, Task
from kv_handshake._timing import Timing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake._messages import AgentMetadata
    from kv_handshake._queries import Rank
    from kv_handshake._session import ClientSession
    from kv_handshake._zmq import ClientSecurity

__all__ = ["ProbeResult", "probe"]

_LONGEST_S = 86_000.0


@final
@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A listener's answers.

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
    """Ask a listener for some ranks, one after the other, and accept any engine.

    Args:
        host: The listener's address or name.
        port: The listener's port.
        ranks: (pp, tp) ranks to ask for.
        dialect: The peer's connector version, 2 to 15.
        timeout_s: Longest wait for each reply.
        security: Keys of an encrypted side channel.

    Raises:
        TransportError: ``name-unresolved``, ``timed-out``, ``connection-refused``, ``connection-lost``,
            ``authentication-refused``.
        WireError: The code of the first fault in a reply; ``refused`` for a refusal.
        ConfigurationError: ``invalid-endpoint``, ``invalid-argument`` or ``unknown-dialect``.
    """
    question = Question(endpoint_of(host, port), tuple(ranks), "", dialect)
    request = HandshakeRequest(question, LocalOffer(policy="off"), keeps_replies=True)
    began_s = time.perf_counter()
    session = _run(request, timeout_s, len(ranks), security)
    payloads = {rank: reply.envelope for rank, reply in session.replies.items()}
    factors = decode_envelope(next(iter(payloads.values()))).factors
    return ProbeResult(
        Recording(dialect, payloads, factors=factors),
        session.peers,
        {rank: reply.rtt_s for rank, reply in session.replies.items()},
        next(iter(session.replies.values())).received_s - began_s,
        session.clock_offset_s,
    )


def _run(request: HandshakeRequest, timeout_s: float, replies: int, security: ClientSecurity | None) -> ClientSession:
    """Run one attempt on a client loop of its own; return the session, or raise the error that ended it."""
    if not 0 < timeout_s <= _LONGEST_S:
        raise ConfigurationError("invalid-argument", f"timeout {timeout_s} s is not above 0 and at most {_LONGEST_S}")
    timing = Timing(deadline_s=min(_LONGEST_S, timeout_s * replies), attempt_s=timeout_s, pipeline=1)
    is_over = threading.Event()
    task = Task(request, lambda _: is_over.set(), timing=timing, now_s=time.monotonic(), attempts_most=1)
    loop = Loop(timing, GatedLog(), security=security, seed=None)
    try:
        loop.submit(task)
        is_over.wait()
    finally:
        loop.close()
    if task.session.error is not None:
        raise task.session.error
    return task.session
