"""Advertisements: the facts about an engine that a router needs before it sends a prompt anywhere.

An advertisement is a few hundred bytes of JSON without addresses of memory. A router, or a discovery service,
collects one per engine and pairs engines by comparing two of them; the bulk metadata per rank is fetched by the
engines themselves.
"""

from __future__ import annotations

from typing import Literal, final

import msgspec

from kv_handshake._decoding import DECODE_ERRORS
from kv_handshake._dialect import dialect_of
from kv_handshake._endpoint import endpoint_of
from kv_handshake._errors import ConfigurationError, HandshakeError, WireError
from kv_handshake._limits import MAX_ENGINE_ID_CHARS, MAX_RANK
from kv_handshake._numbers import check_number
from kv_handshake._policy import PROTOCOL_RANGE

__all__ = ["Advertisement", "Mode"]

Mode = Literal["pull", "push"]

_MAX_BYTES = 16 * 1024
_DIGEST = frozenset("0123456789abcdef")


@final
class Advertisement(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of an engine.

    Attributes:
        engine_id: The engine.
        host: Where its side channel listens, as peers see it.
        port: The side channel's port.
        dialect: Its connector version, 2 to 15.
        compatibility_id: Digest of the factors that must match, see `compatibility_id`.
        compatibility_hash: Digest that vLLM's own connector compares; empty if not told.
        generation: Number of the engine's registration, below 2**53.
        modes: Directions that it supports: ``pull`` (the consumer reads), ``push`` (the producer writes).
        tp_size: Tensor-parallel ranks.
        pp_size: Pipeline-parallel ranks.
        dcp_size: Decode context-parallel ranks.
        pcp_size: Prefill context-parallel ranks.
        protocol: (oldest, newest) version of our extensions.
    """

    engine_id: str
    host: str
    port: int
    dialect: int
    compatibility_id: str
    compatibility_hash: str = ""
    generation: int = 0
    modes: tuple[Mode, ...] = ("pull",)
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    pcp_size: int = 1
    protocol: tuple[int, int] = PROTOCOL_RANGE

    def encode(self) -> bytes:
        """Return the advertisement as JSON, for a listener or a discovery service.

        Raises:
            ConfigurationError: ``invalid-argument`` if no peer would accept it.
        """
        try:
            _check(self)
            check_number("generation", self.generation)
        except HandshakeError as error:
            raise ConfigurationError("invalid-argument", f"advertisement cannot be used: {error}") from error
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Advertisement:
        """Return the advertisement in JSON bytes; unknown keys are skipped.

        Raises:
            WireError: ``malformed-advertisement``.
        """
        if len(data) > _MAX_BYTES:
            raise WireError(
                "malformed-advertisement", f"advertisement of {len(data)} bytes; at most {_MAX_BYTES} are read"
            )
        try:
            advertisement = msgspec.json.decode(data, type=cls)
            _check(advertisement)
        except (*DECODE_ERRORS, HandshakeError) as error:
            raise WireError("malformed-advertisement", f"advertisement of {len(data)} bytes: {error}") from error
        return advertisement

    def problems_as_producer_for(self, consumer: Advertisement, *, mode: Mode = "pull") -> tuple[str, ...]:
        """Return the reasons, in words, not to pair this engine with a consumer; empty if they may be paired.

        Equal advertisements do not promise a transfer: the plan still may find the two layouts impossible to join.
        """
        problems: list[str] = []
        if self.engine_id == consumer.engine_id:
            problems.append(f"both are engine {self.engine_id!r}")
        if self.compatibility_id != consumer.compatibility_id:
            problems.append(
                f"compatibility ids differ: producer {self.compatibility_id}, consumer {consumer.compatibility_id}"
            )
        for role, each in (("producer", self), ("consumer", consumer)):
            if mode not in each.modes:
                problems.append(f"the {role} cannot {mode}, only {', '.join(each.modes) or 'nothing'}")
        newest_common = min(self.protocol[1], consumer.protocol[1])
        if newest_common < max(self.protocol[0], consumer.protocol[0]):
            problems.append(f"protocol ranges do not overlap: {self.protocol}, {consumer.protocol}")
        return tuple(problems)


def _check(advertisement: Advertisement) -> None:
    if endpoint_of(advertisement.host, advertisement.port).is_wildcard:
        raise WireError("malformed-advertisement", f"peers cannot connect to {advertisement.host!r}")
    dialect_of(advertisement.dialect)
    if not 1 <= len(advertisement.engine_id) <= MAX_ENGINE_ID_CHARS:
        raise WireError("malformed-advertisement", f"engine id of {len(advertisement.engine_id)} characters")
    for digest in (advertisement.compatibility_id, advertisement.compatibility_hash):
        if not _DIGEST.issuperset(digest):
            raise WireError("malformed-advertisement", f"{digest[:80]!r} is no hex digest")
    sizes = (advertisement.tp_size, advertisement.pp_size, advertisement.dcp_size, advertisement.pcp_size)
    if not all(1 <= each <= MAX_RANK + 1 for each in sizes) or advertisement.generation < 0:
        raise WireError(
            "malformed-advertisement", f"sizes {sizes} or generation {advertisement.generation} out of range"
        )
    oldest, newest = advertisement.protocol
    if not 1 <= oldest <= newest:
        raise WireError("malformed-advertisement", f"protocol range {advertisement.protocol} is empty")
