"""The comparison of two engines that somebody asks for: factors, hash, and what the opened metadata shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from kv_handshake._dialect import dialect_of
from kv_handshake._explain import explain_hash, suspected_factors
from kv_handshake._factors import Difference, differing_factors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake._messages import AgentMetadata, Envelope

__all__ = ["Comparison", "Snapshot", "compare"]

Basis = Literal["factors", "hash", "hash-explained", "hash-unexplained"]

_METADATA_NAMES = (
    "block_size",
    "kv_cache_layout",
    "attn_backend_name",
    "physical_blocks_per_logical_kv_block",
    "dcp_size",
    "pcp_size",
    "ssm_sizes",
    "block_lens",
    "region_names",
    "region_group_ids",
)
"""What must be looked at although no hash holds it; a transfer plan may bridge these, or not."""


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """One engine as a probe or a recording shows it.

    Attributes:
        name: What to call it.
        dialect: Its connector version.
        envelope: The envelope of the first rank.
        metadata: The metadata in it.
        factors: Its factors: from the envelope, or from a recording; empty if nobody tells.
    """

    name: str
    dialect: int
    envelope: Envelope
    metadata: AgentMetadata
    factors: Mapping[str, object]


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two engines.

    Attributes:
        differences: Every factor and every metadata value that differs; `local` is the first engine.
        suspects: Factors of which one probably differs, if a hash differs that nothing explains.
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
        """Whether nothing is known that must match and does not."""
        return not self.suspects and all(each.group != "must-match" for each in self.differences)

    @property
    def is_equal(self) -> bool:
        """Whether nothing at all differs."""
        return self.is_same_hash and not self.differences and not self.suspects


def compare(left: Snapshot, right: Snapshot, *, supposed: Mapping[str, Sequence[object]] | None = None) -> Comparison:
    """Return what differs between two engines.

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
        for name in _METADATA_NAMES
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
    shown = {"attn_backend_name": silent.metadata.attn_backend_name, "nixl_connector_version": silent.dialect}
    peer_hash = silent.envelope.compatibility_hash
    found = explain_hash(known.factors, peer_hash, dialect, supposed=supposed, shown=shown, depth=2)
    if not found:
        return (), suspected_factors(known.factors, dialect), "hash-unexplained"
    if not is_left:
        found = tuple(Difference(each.name, each.peer, each.local, each.group) for each in found)
    return found, (), "hash-explained"
