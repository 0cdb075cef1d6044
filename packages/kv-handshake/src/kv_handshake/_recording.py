"""Recordings: a listener's replies as a JSON file that can be served, compared or attached to a bug report.

    {"format": "kv-handshake-recording", "version": 1, "dialect": 14,
     "ranks": [{"pp": 0, "tp": 0, "envelope": "<base64>"}], "factors": {...}}

``factors`` may be missing; it holds the factors of an engine that does not send them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import msgspec

from kv_handshake._decoding import DECODE_ERRORS
from kv_handshake._dialect import dialect_of
from kv_handshake._errors import ConfigurationError, HandshakeError
from kv_handshake._queries import check_rank
from kv_handshake._reading import decode_envelope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_handshake._queries import Rank

__all__ = ["Recording"]

_FORMAT = "kv-handshake-recording"
_MAX_BYTES = 256 * 1024 * 1024


class _RankRecord(msgspec.Struct, frozen=True):
    pp: int
    tp: int
    envelope: bytes  # base64 in the file


class _Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: str
    version: int
    dialect: int
    ranks: list[_RankRecord]
    factors: dict[str, Any] = {}


@final
@dataclass(frozen=True, slots=True)
class Recording:
    """Replies of one engine's listener.

    Attributes:
        dialect: The engine's connector version.
        payloads: Envelope bytes by (pp, tp) rank.
        factors: The engine's factors, if its envelopes do not carry them.
    """

    dialect: int
    payloads: Mapping[Rank, bytes]
    factors: Mapping[str, object] = field(default_factory=dict[str, object])

    def write(self, path: str | Path) -> None:
        """Write the recording to a file."""
        document = _Document(
            format=_FORMAT,
            version=1,
            dialect=self.dialect,
            ranks=[_RankRecord(pp, tp, payload) for (pp, tp), payload in sorted(self.payloads.items())],
            factors=dict(self.factors),
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
            return _interpret(msgspec.json.decode(file.read_bytes(), type=_Document))
        except (OSError, *DECODE_ERRORS, HandshakeError) as error:
            raise ConfigurationError(
                "invalid-recording", f"recording {file} cannot be read: {error}", path=str(file)
            ) from error


def _interpret(document: _Document) -> Recording:
    if document.format != _FORMAT or document.version != 1:
        raise ConfigurationError("invalid-recording", f"the format is not {_FORMAT!r} version 1")
    payloads = {(each.pp, each.tp): each.envelope for each in document.ranks}
    if not payloads:
        raise ConfigurationError("invalid-recording", "it holds no rank")
    for rank, payload in payloads.items():
        check_rank(rank)
        decode_envelope(payload)
    return Recording(
        dialect=dialect_of(document.dialect).version,
        payloads=payloads,
        factors=document.factors,
    )
