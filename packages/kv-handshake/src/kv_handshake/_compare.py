"""The comparison of two engines by factors, hash and opened metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from kv_handshake._dialect import dialect_of
from kv_handshake._explain import explain_hash, suspected_factors
from kv_handshake._factors import Difference, differing_factors
from kv_handshake._messages import METADATA_FIELDS
from kv_handshake._reading import decode_envelope, decode_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake._messages import AgentMetadata, Envelope
    from kv_handshake._recording import Recording

__all__ = ["Comparison", "Snapshot", "compare"]

Basis = Literal["factors", "hash", "hash-explained", "hash-unexplained"]

_COMPARED = tuple(each.name for each in METADATA_FIELDS if each.wire.is_compared)


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine as a probe or a recording shows it.

    Attributes:
        name: Name for messages.
        dialect: Its connector version.
        envelope: The envelope of the first rank.
        metadata: The metadata in it.
        factors: Its factors, from the envelope or from a recording; empty if neither has them.
    """

    name: str
    dialect: int
    envelope: Envelope
    metadata: AgentMetadata
    factors: Mapping[str, object]

    @staticmethod
    def of(name: str, recording: Recording) -> Snapshot:
        """Return the snapshot of a recorded engine."""
        envelope = decode_envelope(next(iter(recording.payloads.values())))
        factors = envelope.factors or recording.factors
        return Snapshot(name, recording.dialect, envelope, decode_metadata(envelope), factors)


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two engines.

    Attributes:
        differences: Every factor and every metadata value that differs; `local` is the first engine.
        suspects: Factors likely to be at fault when the hashes differ and no tried value explains it.
        is_same_hash: Whether the compatibility hashes are equal.
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


def compare(left: Snapshot, right: Snapshot, *, supposed: Mapping[str, Sequence[object]] | None = None) -> Comparison:
    """Compare two engines.

    Args:
        left: The first engine.
        right: The second engine.
        supposed: Values to try, by factor name, for an engine that sends only its hash.
    """
    is_same_hash = left.envelope.compatibility_hash == right.envelope.compatibility_hash
    differences, suspects, basis = _compare_factors(left, right, is_same_hash, supposed or {})
    named = {each.name for each in differences}
    shown = [
        Difference(name, getattr(left.metadata, name), getattr(right.metadata, name), "may-differ")
        for name in _COMPARED
        if name not in named and getattr(left.metadata, name) != getattr(right.metadata, name)
    ]
    return Comparison((*differences, *shown), suspects, is_same_hash, basis)


def _compare_factors(
    left: Snapshot, right: Snapshot, is_same_hash: bool, supposed: Mapping[str, Sequence[object]]
) -> tuple[tuple[Difference, ...], tuple[str, ...], Basis]:
    if left.factors and right.factors:
        return differing_factors(left.factors, right.factors), (), "factors"
    if is_same_hash:
        return (), (), "hash"
    known, silent, is_left = (left, right, True) if left.factors else (right, left, False)
    if not known.factors:
        return (), ("any hashed factor",), "hash-unexplained"
    dialect = dialect_of(silent.dialect)
    # The silent engine's metadata and dialect show two of its factors.
    shown = {"attn_backend_name": (silent.metadata.attn_backend_name,), "nixl_connector_version": (silent.dialect,)}
    tried = {name: (*supposed.get(name, ()), *shown.get(name, ())) for name in {**supposed, **shown}}
    found = explain_hash(known.factors, silent.envelope.compatibility_hash, dialect, supposed=tried)
    if not found:
        return (), suspected_factors(known.factors, dialect), "hash-unexplained"
    if not is_left:
        found = tuple(Difference(each.name, each.peer, each.local, each.group) for each in found)
    return found, (), "hash-explained"
