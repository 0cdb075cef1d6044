"""Requesting the metadata of a live listener once, by hand: its frames are kept, and nothing is retried."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import msgspec

from kv_handshake.core.endpoint import endpoint_of, parse_endpoint
from kv_handshake.core.handshake import Handshake, Timing
from kv_handshake.core.pacing import GatedLog
from kv_handshake.core.session import ClientSession
from kv_handshake.errors import ConfigurationError
from kv_handshake.net.loop import Loop
from kv_handshake.sockets import ClientSecurity
from kv_handshake.tools.recording import Recording, shorten
from kv_handshake.wire.policy import LocalOffer
from kv_handshake.wire.replies import decode_envelope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake.wire.messages import AgentMetadata
    from kv_handshake.wire.queries import Rank

__all__ = [
    "DEFAULT_DIALECT",
    "ProbeResult",
    "probe",
    "probe_text",
    "probe_values",
    "ranks_of",
    "recording_of",
    "security_of",
    "supposed_of",
]

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
    if not 0 < timeout_s <= _LONGEST_S:
        raise ConfigurationError("invalid-argument", f"timeout {timeout_s} s is not above 0 and at most {_LONGEST_S}")
    began_s, ended = time.monotonic(), threading.Event()
    timing = Timing(deadline_s=min(_LONGEST_S, timeout_s * len(ranks)), attempt_s=timeout_s, pipeline=1)
    new_session = partial(ClientSession, LocalOffer(policy="off"), ranks, dialect=dialect, keeps_replies=True)
    task = Handshake(
        endpoint_of(host, port),
        new_session,
        lambda _: ended.set(),
        timing=timing,
        start_s=began_s,
        attempts_most=1,
    )
    loop = Loop(timing, GatedLog(), security=security, seed=None)
    try:
        loop.call(lambda: loop.start(task))
        ended.wait()
    finally:
        loop.close()
    session = task.session
    if session.error is not None:
        raise session.error
    replies = session.replies
    first = next(iter(replies.values()))
    return ProbeResult(
        Recording(
            dialect,
            {rank: reply.envelope for rank, reply in replies.items()},
            factors=decode_envelope(first.envelope).factors,
        ),
        session.peers,
        {rank: reply.rtt_s for rank, reply in replies.items()},
        first.received_s - began_s,
        session.clock_offset_s,
    )


DEFAULT_DIALECT = 5
"""Oldest dialect whose queries have three fields. vLLM's own listeners crash on a query of another shape: from 0.26 on they take
three fields, before that two. So 5 is safe for all since 0.26, and ours answer either shape.
"""


def recording_of(
    source: str, ranks: Sequence[Rank], *, dialect: int, timeout_s: float, security: ClientSecurity | None
) -> Recording:
    """Return the recording in a file, or of the live engine at HOST:PORT."""
    if Path(source).exists():
        return Recording.read(source)
    endpoint = parse_endpoint(source)
    return probe(
        endpoint.host, endpoint.port, ranks=ranks, dialect=dialect, timeout_s=timeout_s, security=security
    ).recording


def ranks_of(texts: Sequence[str]) -> list[Rank]:
    """Return the ranks that `--rank` names: TP, PP:TP or TP-TP each; rank (0, 0) without any."""
    ranks: dict[Rank, None] = {}
    for text in texts or ["0"]:
        ranks |= dict.fromkeys(_rank_range(text))
    if not ranks:
        raise ConfigurationError("invalid-argument", "--rank names no rank")
    return list(ranks)


def _rank_range(text: str) -> list[Rank]:
    """Return the ranks of one word. Example: `1:0-2` is ranks 0 to 2 of stage 1."""
    pp, colon, tp = text.rpartition(":")
    first, _, last = tp.partition("-")
    numbers = (pp or "0", first, last or first)
    if not all(each.isascii() and each.isdigit() for each in numbers) or (colon and not pp):
        raise ConfigurationError("invalid-argument", f"--rank {text!r} is not TP, PP:TP or TP-TP")
    return [(int(numbers[0]), each) for each in range(int(first), min(int(numbers[2]), 65_535) + 1)]


def supposed_of(texts: Sequence[str]) -> dict[str, list[object]]:
    """Return the values that `--suppose` gives by factor name: FACTOR=VALUE, JSON or else plain text."""
    supposed: dict[str, list[object]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError("invalid-argument", f"--suppose {text!r} is not FACTOR=VALUE")
        try:
            parsed: object = json.loads(value)
        except ValueError:
            parsed = value
        supposed.setdefault(name, []).append(parsed)
    return supposed


def security_of(secret: str | None, server: str | None) -> ClientSecurity | None:
    """Return the keys in the files of `--secret-key` and `--server-key`, None without both."""
    if secret is None and server is None:
        return None
    if secret is None or server is None:
        raise ConfigurationError("invalid-argument", "give --secret-key and --server-key together")
    return ClientSecurity.read(secret, server)


def probe_values(name: str, result: ProbeResult) -> dict[str, object]:
    """Return a probe as JSON values; opaque blobs become their length and SHA-256."""
    return {
        "peer": name,
        "dialect": result.recording.dialect,
        "connect_s": result.connect_s,
        "clock_offset_s": result.clock_offset_s,
        "ranks": [
            {
                "pp": rank[0],
                "tp": rank[1],
                "rtt_s": result.rtts_s[rank],
                "envelope": _envelope_values(result, rank),
                "metadata": _metadata_values(metadata),
            }
            for rank, metadata in result.peers.items()
        ],
    }


def probe_text(name: str, result: ProbeResult) -> str:
    """Return a probe as lines for a person; long lists are cut and counted."""
    lines = [f"{name}: version {result.recording.dialect}, first reply after {result.connect_s * 1000:.1f} ms"]
    if result.clock_offset_s is not None:
        lines.append(f"  clock offset {result.clock_offset_s:+.6f} s")
    for rank, metadata in result.peers.items():
        lines.append(f"  pp rank {rank[0]}, tp rank {rank[1]}: {result.rtts_s[rank] * 1000:.1f} ms")
        for key, value in {**_envelope_values(result, rank), **_metadata_values(metadata)}.items():
            if value is not None:
                lines.append(f"    {key:38} {shorten(value)}")
    return "\n".join(lines)


def _envelope_values(result: ProbeResult, rank: Rank) -> dict[str, object]:
    envelope = decode_envelope(result.recording.payloads[rank])
    values: dict[str, object] = {"compatibility_hash": envelope.compatibility_hash, "protocol": envelope.protocol}
    if envelope.protocol is not None:
        values |= {"factors": envelope.factors, "capabilities": envelope.capabilities}
    return values


def _metadata_values(metadata: AgentMetadata) -> dict[str, object]:
    values: dict[str, Any] = msgspec.structs.asdict(metadata)
    for name in ("agent_metadata", "geometry"):
        blob = values[name]
        if blob is not None:
            values[name] = {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
    del values["factors"]
    return values
