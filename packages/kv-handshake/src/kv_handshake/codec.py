"""A single object that writes and reads every byte outside the side channel's own loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import msgspec

from kv_handshake.core.server import ServerCore
from kv_handshake.core.session import ClientSession
from kv_handshake.stream.messages import answer_payload, question_payload, read_answer, read_question
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.factors import check_factors, compatibility_hash, hashed_factors
from kv_handshake.wire.limits import check_number
from kv_handshake.wire.messages import AgentMetadata, Envelope, checksum_of
from kv_handshake.wire.notifications import (
    RESERVED_PREFIXES,
    Notification,
    encode_heartbeats,
    encode_read_complete,
    parse_notification,
)
from kv_handshake.wire.policy import PROTOCOL_RANGE, Level, LocalOffer
from kv_handshake.wire.queries import Rank, check_rank
from kv_handshake.wire.replies import decode_envelope, decode_metadata, encode_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Codec"]

_encoder = msgspec.msgpack.Encoder()


@final
class Codec:
    """Writes and reads envelopes and notifications. Stateless and safe to share between threads.

    Args:
        capabilities: Capabilities to announce: ``required``, ``supported`` or ``absent`` by name.
        protocol: (oldest, newest) version of our extensions to announce.
    """

    def __init__(
        self, *, capabilities: Mapping[str, Level] | None = None, protocol: tuple[int, int] = PROTOCOL_RANGE
    ) -> None:
        self._offer = LocalOffer(capabilities=capabilities or {}, protocol=protocol)

    def encode_envelope(
        self,
        metadata: Mapping[str, object],
        factors: Mapping[str, object],
        *,
        dialect: int,
        rank: Rank | None = None,
    ) -> bytes:
        """Return the envelope of one rank, for a listener to serve.

        Args:
            metadata: Values by the names of `AgentMetadata`, among them ``generation``, ``fence`` and ``geometry``
                if the engine has them. Names that the dialect does not know are left out.
            factors: The engine's factors. If all of vLLM's names are among them the hash is vLLM's own.
            dialect: Connector version to write, 2 to 15.
            rank: (pp, tp) rank to announce, so that a reader can tell if a reply is not the one it asked for.

        Raises:
            ConfigurationError: ``unknown-dialect``, ``missing-field``, ``invalid-factors`` or ``invalid-argument``.
            WireError: ``malformed-metadata`` or ``invalid-metadata`` if every peer would refuse the metadata.
        """
        version = dialect_of(dialect)
        check_factors(factors)
        if rank is not None:
            check_rank(rank)
        encoded = encode_metadata(metadata, version)
        generation = metadata.get("generation")
        if isinstance(generation, int):
            check_number("generation", generation)
        return _encoder.encode(
            Envelope(
                compatibility_hash=compatibility_hash(hashed_factors(factors, version)),
                agent_metadata_bytes=encoded,
                protocol=self._offer.protocol,
                rank=rank,
                generation=generation if isinstance(generation, int) else None,
                factors=dict(factors),
                checksum=checksum_of(encoded),
                capabilities=dict(self._offer.capabilities),
            )
        )

    def compatibility_hash(self, factors: Mapping[str, object]) -> str:
        """Return the SHA-256 hex digest of the factors as sorted JSON, equal to vLLM's for the same mapping.

        Raises:
            ConfigurationError: ``invalid-factors`` for values that JSON cannot write.
        """
        return compatibility_hash(factors)

    @staticmethod
    def decode_envelope(frame: bytes) -> Envelope:
        """Return the envelope in a reply's first frame; its metadata stays closed.

        Raises:
            WireError: ``oversized-reply``, ``malformed-envelope`` or ``checksum-mismatch``.
        """
        return decode_envelope(frame)

    @staticmethod
    def decode_metadata(envelope: Envelope) -> AgentMetadata:
        """Open an accepted envelope and return its metadata, checked.

        Raises:
            WireError: ``malformed-metadata`` or ``invalid-metadata``.
        """
        return decode_metadata(envelope)

    @staticmethod
    def server_core(payloads: Mapping[Rank, bytes]) -> ServerCore:
        """Return the listener's half of the protocol without its socket: `respond` turns a query into the frames of a reply.

        For transports of your own, such as HTTP: any bytes get an answer or a coded refusal, and nothing is raised.

        Args:
            payloads: Envelope by (pp, tp) rank.

        Raises:
            ConfigurationError: ``invalid-argument`` for a rank out of range.
        """
        return ServerCore(payloads)

    @staticmethod
    def client_session(
        offer: LocalOffer,
        ranks: Sequence[Rank],
        *,
        dialect: int,
        engine_id: str = "",
        generation: int | None = None,
    ) -> ClientSession:
        """Return the client's half of one handshake without its socket: `next_query`, `receive_message`, `peers`, `error`.

        Args:
            offer: This engine's side of the comparison.
            ranks: (pp, tp) ranks to ask for, each once, in this order.
            dialect: The peer's connector version, 2 to 15.
            engine_id: The engine that must answer; empty if any may.
            generation: The registration generation that the ticket was made with; None to accept any.

        Raises:
            ConfigurationError: ``invalid-argument`` or ``unknown-dialect``.
        """
        return ClientSession(ranks=ranks, version=dialect, offer=offer, engine_id=engine_id, generation=generation)

    @property
    def reserved_prefixes(self) -> tuple[str, ...]:
        """Request ids that begin with one of these cannot be notified."""
        return RESERVED_PREFIXES

    def read_complete(self, request_id: str, reader_count: int, *, nonce: str = "", consumer: str = "") -> bytes:
        """Return the notification that a read is complete: vLLM's form without a nonce, ours with one.

        Args:
            request_id: The request's id on the producer.
            reader_count: Ranks of this consumer that report this request to that producer rank, 1 to 65 536.
            nonce: The lease's nonce from the ticket, 1 to 64 printable ASCII characters.
            consumer: Engine id of the reader; must be "" without a nonce.

        Raises:
            ConfigurationError: ``invalid-argument`` if the peer could not read the result back.
        """
        return encode_read_complete(request_id, reader_count, nonce=nonce, consumer=consumer)

    def heartbeats(self, readers: Sequence[tuple[str, str]]) -> tuple[bytes, ...]:
        """Return the notifications that renew leases, for (request id, nonce) pairs; nonce "" selects vLLM's form.

        Raises:
            ConfigurationError: ``invalid-argument`` for an id or a nonce that the peer could not read back.
        """
        return encode_heartbeats(readers)

    def question_payload(self, question: Mapping[str, object], secrets: Sequence[bytes]) -> bytes:
        """Return an ask's payload with a question for a streamed hand-over, sealed by the first secret if there is one.

        Args:
            question: ``hand_over_id`` and ``nonce`` (32 hex digits), ``number``, ``digest`` (64 hex digits), ``tokens`` and
                ``wants_final``.
            secrets: Fleet secrets.

        Raises:
            ConfigurationError: ``invalid-argument`` for values that no peer takes.
        """
        return question_payload(question, secrets)

    def answer_payload(
        self, question: Mapping[str, object], answer: Mapping[str, object], secrets: Sequence[bytes]
    ) -> bytes:
        """Return the payload of the answer to a question, sealed in the same way.

        Args:
            question: As `read_question` returned it.
            answer: ``kind`` ``"offer"`` with ``request_id``, ``slot``, ``generation``, ``tag`` and ``ticket``; ``"final"`` with
                the same but ``tag``; or ``"no"`` with ``reason``.
            secrets: Fleet secrets.

        Raises:
            ConfigurationError: ``invalid-argument`` for values that no peer takes.
        """
        return answer_payload(question, answer, secrets)

    def read_question(self, payload: bytes, secrets: Sequence[bytes]) -> dict[str, object]:
        """Return the question in an ask's payload; with secrets, accept only a question that one of them has sealed.

        Raises:
            WireError: ``malformed-hand-over`` or ``hand-over-seal``.
        """
        return read_question(payload, secrets)

    def read_answer(
        self, payload: bytes, question: Mapping[str, object], secrets: Sequence[bytes]
    ) -> dict[str, object]:
        """Return the answer to this very question, by the keys of `answer_payload`.

        Raises:
            WireError: ``malformed-hand-over``, ``hand-over-seal`` or ``hand-over-mismatch``.
        """
        return read_answer(payload, question, secrets)

    def parse_notification(self, payload: bytes) -> Notification:
        """Parse a notification of any form; never raises."""
        return parse_notification(payload)
