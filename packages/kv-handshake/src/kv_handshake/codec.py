"""A single object that writes and reads every byte outside the side channel's own loops."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, final

import msgspec

from kv_handshake.core.server import ServerCore
from kv_handshake.core.session import ClientSession
from kv_handshake.errors import ConfigurationError
from kv_handshake.wire.asks import answer_payload, question_payload, read_answer, read_question
from kv_handshake.wire.dialects import DEFAULT_DIALECT, dialect_of
from kv_handshake.wire.factors import check_factors, compatibility_hash, wire_hash
from kv_handshake.wire.limits import NUMBER_END
from kv_handshake.wire.messages import AgentMetadata, Envelope
from kv_handshake.wire.notifications import (
    RESERVED_PREFIXES,
    encode_heartbeats,
    encode_read_complete,
    parse_notification,
)
from kv_handshake.wire.policy import PROTOCOL_RANGE, Level, LocalOffer
from kv_handshake.wire.queries import Rank, check_rank
from kv_handshake.wire.replies import decode_envelope, decode_metadata, encode_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Codec"]


@final
class Codec:
    """Writes and reads envelopes and notifications. Stateless and safe to share between threads.

    Args:
        capabilities: Capabilities to announce: ``required``, ``supported`` or ``absent`` by name.

    Attributes:
        reserved_prefixes: Request ids that begin with one of these cannot be notified.
    """

    def __init__(self, *, capabilities: Mapping[str, Level] | None = None) -> None:
        self._capabilities = LocalOffer(capabilities={} if capabilities is None else capabilities).capabilities

    def encode_envelope(
        self,
        metadata: Mapping[str, object] | AgentMetadata,
        factors: Mapping[str, object],
        *,
        dialect: int = DEFAULT_DIALECT,
        rank: Rank | None = None,
    ) -> bytes:
        """Return the envelope of one rank, for a listener to serve.

        Args:
            metadata: An `AgentMetadata`, or values by its names, among them ``generation``, ``fence`` and ``geometry``
                if the engine has them. Names that the dialect does not know are left out.
            factors: The engine's factors. If all of vLLM's names are among them the hash is vLLM's own.
            dialect: Connector version to write, 2 to 15; the default is for engines that are not vLLM.
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
        generation = metadata.generation if isinstance(metadata, AgentMetadata) else metadata.get("generation")
        # Tickets carry it through routers, many of which keep JSON numbers as 64-bit floats.
        if generation is not None and not (type(generation) is int and 0 <= generation < NUMBER_END):
            raise ConfigurationError("invalid-argument", f"generation {generation!r} is not 0 to 2**53 - 1")
        return msgspec.msgpack.encode(
            Envelope(
                compatibility_hash=wire_hash(factors, version),
                agent_metadata_bytes=encoded,
                protocol=PROTOCOL_RANGE,
                rank=rank,
                generation=generation,
                factors=dict(factors),
                checksum=zlib.crc32(encoded),
                capabilities=dict(self._capabilities),
            )
        )

    reserved_prefixes = RESERVED_PREFIXES
    compatibility_hash = staticmethod(compatibility_hash)
    decode_envelope = staticmethod(decode_envelope)
    decode_metadata = staticmethod(decode_metadata)
    server_core = staticmethod(ServerCore)
    client_session = staticmethod(ClientSession)
    read_complete = staticmethod(encode_read_complete)
    heartbeats = staticmethod(encode_heartbeats)
    parse_notification = staticmethod(parse_notification)
    question_payload = staticmethod(question_payload)
    answer_payload = staticmethod(answer_payload)
    read_question = staticmethod(read_question)
    read_answer = staticmethod(read_answer)
