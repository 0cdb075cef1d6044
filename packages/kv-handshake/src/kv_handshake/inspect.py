"""Looking at engines by hand: probes, recordings and comparisons.

A probe requests the metadata of a live listener once: its frames are kept, and nothing is retried. A recording is a
listener's replies as a JSON file that can be served, compared or attached to a bug report:

    {"format": "kv-handshake-recording", "version": 1, "dialect": 14,
     "ranks": [{"pp": 0, "tp": 0, "envelope": "<base64>"}]}
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import msgspec

from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.core.handshake import Handshake, Timing
from kv_handshake.core.pacing import GatedLog
from kv_handshake.core.session import ClientSession
from kv_handshake.errors import ConfigurationError, HandshakeError, TransportError, require
from kv_handshake.net.loop import Loop
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.factors import (
    Difference,
    differing_factors,
    explain_hash,
    hash_with_declared,
    suspected_factors,
)
from kv_handshake.wire.limits import DECODE_ERRORS
from kv_handshake.wire.messages import METADATA_FIELDS
from kv_handshake.wire.policy import LocalOffer
from kv_handshake.wire.queries import check_rank
from kv_handshake.wire.replies import decode_envelope, decode_metadata

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kv_handshake.security import ClientSecurity
    from kv_handshake.wire.messages import AgentMetadata
    from kv_handshake.wire.queries import Rank

__all__ = ["Comparison", "Difference", "Recording", "compare", "probe"]

_FORMAT = "kv-handshake-recording"
_MAX_BYTES = 256 * 1024 * 1024
_HTTP_S = 1.0
_HTTP = "an HTTP server answers there, not a side channel; the side channel's port is VLLM_NIXL_SIDE_CHANNEL_PORT, default 5600"


class _RankRecord(msgspec.Struct, frozen=True):
    pp: int
    tp: int
    envelope: bytes  # base64 in the file


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    version: int
    dialect: int
    ranks: list[_RankRecord]


@final
@dataclass(frozen=True, slots=True)
class Recording:
    """Replies of one engine's listener.

    Attributes:
        dialect: The engine's connector version.
        payloads: Envelope bytes by (pp, tp) rank.
    """

    dialect: int
    payloads: Mapping[Rank, bytes]

    def write(self, path: str | Path) -> None:
        """Write the recording to a file."""
        document = _Document(
            format=_FORMAT,
            version=1,
            dialect=self.dialect,
            ranks=[_RankRecord(pp, tp, payload) for (pp, tp), payload in sorted(self.payloads.items())],
        )
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")

    @staticmethod
    def read(path: str | Path) -> Recording:
        """Return the recording in a file.

        Raises:
            ConfigurationError: ``invalid-recording``.
        """
        file = Path(path)
        try:
            if file.stat().st_size > _MAX_BYTES:
                raise ConfigurationError("invalid-recording", f"it exceeds {_MAX_BYTES} bytes")
            document = msgspec.json.decode(file.read_bytes(), type=_Document)
            if document.format != _FORMAT or document.version != 1:
                raise ConfigurationError("invalid-recording", f"the format is not {_FORMAT!r} version 1")
            payloads = {(each.pp, each.tp): each.envelope for each in document.ranks}
            if not payloads:
                raise ConfigurationError("invalid-recording", "it holds no rank")
            for rank, payload in payloads.items():
                check_rank(rank)
                decode_envelope(payload)
            return Recording(dialect_of(document.dialect).version, payloads)
        except (OSError, *DECODE_ERRORS, HandshakeError) as error:
            raise ConfigurationError(
                "invalid-recording", f"recording {file} cannot be read: {error}", path=str(file)
            ) from error


Basis = Literal["factors", "hash", "hash-explained", "hash-unexplained"]

_COMPARED = tuple(each.name for each in METADATA_FIELDS if each.wire.is_compared)


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two engines.

    Attributes:
        differences: Every factor and every metadata value that differs; `local` is the first engine.
        suspects: Factors likely to be at fault when the hashes differ and no tried value explains it.
        is_same_hash: Whether the compatibility hashes are equal, apart from what `may_differ` declares.
        basis: How the factors were compared: both sides' ``factors``, equal ``hash``, or a differing hash that trying
            values ``explained`` or not.
    """

    differences: tuple[Difference, ...]
    suspects: tuple[str, ...]
    is_same_hash: bool
    basis: Basis

    @property
    def is_compatible(self) -> bool:
        """True unless a must-match factor is known to differ."""
        return not self.suspects and all(each.group != "must-match" for each in self.differences)

    @property
    def is_equal(self) -> bool:
        """Whether the engines are equal in everything that is compared."""
        return self.is_same_hash and not self.differences and not self.suspects


class _Side(NamedTuple):
    """Facts that an engine's first recorded rank shows."""

    dialect: int
    compatibility_hash: str
    metadata: AgentMetadata


def _side(recording: Recording) -> _Side:
    envelope = decode_envelope(next(iter(recording.payloads.values())))
    return _Side(recording.dialect, envelope.compatibility_hash, decode_metadata(envelope))


def compare(
    first: Recording,
    second: Recording,
    *,
    supposed: Mapping[str, Sequence[object]] | None = None,
    may_differ: Collection[str] = (),
) -> Comparison:
    """Compare two engines by the first rank of each.

    Args:
        first: The first engine.
        second: The second engine.
        supposed: Values to try, by factor name, for an engine that sends only its hash.
        may_differ: As in `LocalOffer`.

    Raises:
        WireError: As `Codec.decode_envelope` and `Codec.decode_metadata`.
    """
    require(Recording, first=first, second=second)
    left, right = _side(first), _side(second)
    ours, theirs = left.metadata.factors, right.metadata.factors
    expected = left.compatibility_hash
    if ours and theirs:  # as a reader does, see `judge`
        expected = hash_with_declared(ours, theirs, may_differ, dialect_of(right.dialect))
    is_same_hash = expected == right.compatibility_hash
    differences, suspects, basis = _compare_factors(left, right, is_same_hash, supposed or {}, may_differ)
    named = {each.name for each in differences}
    shown = [
        Difference(name, getattr(left.metadata, name), getattr(right.metadata, name), "may-differ")
        for name in _COMPARED
        if name not in named and getattr(left.metadata, name) != getattr(right.metadata, name)
    ]
    return Comparison((*differences, *shown), suspects, is_same_hash, basis)


def _compare_factors(
    left: _Side,
    right: _Side,
    is_same_hash: bool,
    supposed: Mapping[str, Sequence[object]],
    may_differ: Collection[str],
) -> tuple[tuple[Difference, ...], tuple[str, ...], Basis]:
    if left.metadata.factors and right.metadata.factors:
        return differing_factors(left.metadata.factors, right.metadata.factors, may_differ), (), "factors"
    if is_same_hash:
        return (), (), "hash"
    known, silent = (left, right) if left.metadata.factors else (right, left)
    if not known.metadata.factors:
        return (), ("any hashed factor",), "hash-unexplained"
    # The silent engine's metadata and dialect show two of its factors.
    shown = {"attn_backend_name": (silent.metadata.attn_backend_name,), "nixl_connector_version": (silent.dialect,)}
    tried = {name: (*supposed.get(name, ()), *shown.get(name, ())) for name in {**supposed, **shown}}
    dialect = dialect_of(silent.dialect)
    found = explain_hash(known.metadata.factors, silent.compatibility_hash, dialect, supposed=tried)
    if not found:
        return (), suspected_factors(known.metadata.factors, dialect), "hash-unexplained"
    if known is right:
        found = tuple(Difference(each.name, each.peer, each.local, each.group) for each in found)
    return found, (), "hash-explained"


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
            ``authentication-refused`` (with `is_http` in its context where an HTTP server answers).
        WireError: The code of the first fault in a reply; ``refused`` for a refusal.
        ConfigurationError: ``invalid-endpoint``, ``invalid-argument`` or ``unknown-dialect``.
    """
    require((tuple, list), ranks=ranks)
    require((int, float), timeout_s=timeout_s)
    began_s, ended = time.monotonic(), threading.Event()
    timing = Timing(deadline_s=min(_LONGEST_S, timeout_s * len(ranks)), attempt_s=timeout_s, pipeline=1)
    new_session = partial(ClientSession, LocalOffer(policy="off"), ranks, dialect=dialect, keeps_replies=True)
    endpoint = endpoint_of(host, port)
    task = Handshake(endpoint, new_session, lambda _: ended.set(), timing=timing, start_s=began_s, attempts_most=1)
    loop = Loop(timing, GatedLog(), security=security, seed=None)
    try:
        loop.call(lambda: loop.start(task))
        ended.wait()
    finally:
        loop.close()
    session = task.session
    if session.error is not None:
        if isinstance(session.error, TransportError) and _is_http(endpoint.host, port, min(timeout_s, _HTTP_S)):
            raise TransportError("authentication-refused", _HTTP, is_http=True) from session.error
        raise session.error
    replies = session.replies
    return ProbeResult(
        Recording(dialect, {rank: reply.envelope for rank, reply in replies.items()}),
        session.peers,
        {rank: reply.rtt_s for rank, reply in replies.items()},
        next(iter(replies.values())).received_s - began_s,
        session.clock_offset_s,
    )


def _is_http(host: str, port: int, wait_s: float) -> bool:
    """Return whether an HTTP server answers there within twice this time."""
    with suppress(OSError), socket.create_connection((host, port), wait_s) as connection:
        connection.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
        return connection.recv(5) == b"HTTP/"
    return False
