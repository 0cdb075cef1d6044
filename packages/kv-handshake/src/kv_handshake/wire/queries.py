"""Queries: the messages of a client to a listener."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from kv_handshake.errors import ConfigurationError, WireError, require
from kv_handshake.wire.limits import DECODE_ERRORS, MAX_QUERY_BYTES, MAX_RANK

if TYPE_CHECKING:
    from kv_handshake.wire.dialects import Dialect

__all__ = ["Query", "Rank", "check_askable", "check_rank", "encode_query", "parse_query"]

Rank = tuple[int, int]
"""(pp rank, tp rank)."""

_METADATA = b"get_meta_msg"


class Query(NamedTuple):
    """A parsed query.

    Attributes:
        rank: (pp, tp) rank that is asked for.
        wants_clock: Whether the asker's dialect expects a clock frame.
    """

    rank: Rank
    wants_clock: bool


def encode_query(rank: Rank, dialect: Dialect) -> bytes:
    """Return the query for one rank's metadata in a dialect.

    Raises:
        ConfigurationError: ``invalid-argument`` for a rank out of range, or a pp rank above 0 in a dialect without one.
    """
    check_askable(rank, dialect)
    return msgspec.msgpack.encode((_METADATA, *rank) if dialect.has_clock_frame else (_METADATA, rank[1]))


def check_askable(rank: Rank, dialect: Dialect) -> None:
    """Raise ``invalid-argument`` unless a query in this dialect can name the rank."""
    check_rank(rank)
    if rank[0] and not dialect.has_clock_frame:
        raise ConfigurationError(
            "invalid-argument",
            f"a peer of version {dialect.version} has no pipeline ranks, but pp rank {rank[0]} was asked for",
            pp_rank=rank[0],
            dialect=dialect.version,
        )


def check_rank(rank: Rank) -> None:
    """Raise ``invalid-argument`` unless it is a pair of ranks."""
    require(tuple, rank=rank)
    if [*map(type, rank)] != [int, int] or not all(0 <= number <= MAX_RANK for number in rank):
        raise ConfigurationError("invalid-argument", f"rank {rank!r} is not a pair (pp, tp) of 0 to {MAX_RANK}")


# Engines send the same few queries over and over: those of 1024 ranks, 256 kB at the most, are read once.
@lru_cache(maxsize=1024)
def parse_query(frame: bytes) -> Query:
    """Parse a query.

    Raises:
        WireError: ``oversized-query``, ``malformed-query``, ``unknown-command``, ``wrong-arity`` or ``wrong-type``.
    """
    if len(frame) > MAX_QUERY_BYTES:
        raise WireError("oversized-query", f"query of {len(frame)} bytes; at most {MAX_QUERY_BYTES} are read")
    try:
        fields: Any = msgspec.msgpack.decode(frame)
    except DECODE_ERRORS as error:
        raise WireError("malformed-query", f"query of {len(frame)} bytes does not decode: {error}") from error
    if not isinstance(fields, list) or not fields:
        raise WireError("malformed-query", "query is not an array of a command and its fields")
    return _interpret(cast("list[object]", fields))


def _interpret(fields: list[object]) -> Query:
    command, *numbers = fields
    if command != _METADATA:
        raise WireError("unknown-command", "the first field is not the bytes 'get_meta_msg'")
    if len(numbers) not in (1, 2):
        raise WireError("wrong-arity", f"metadata query with {len(fields)} fields; it has 2 (tp) or 3 (pp, tp)")
    ranks = [number for number in numbers if isinstance(number, int) and not isinstance(number, bool) and number >= 0]
    if len(ranks) != len(numbers):
        raise WireError("wrong-type", "a rank is not a non-negative integer")
    return Query((ranks[0] if len(ranks) == 2 else 0, ranks[-1]), wants_clock=len(ranks) == 2)
