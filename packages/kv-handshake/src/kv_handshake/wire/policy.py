"""The decision whether two engines may exchange KV cache, made from an envelope before its metadata is opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, final

from kv_handshake.errors import ConfigurationError, shortened
from kv_handshake.wire.dialects import NEWEST_DIALECT, OLDEST_DIALECT, dialect_of
from kv_handshake.wire.factors import (
    Difference,
    check_factors,
    compatibility_hash,
    differing_factors,
    explain_hash,
    hashed_factors,
)
from kv_handshake.wire.messages import usable_capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_handshake.wire.messages import Envelope

__all__ = ["PROTOCOL_RANGE", "LocalOffer", "Policy", "Verdict", "judge"]

Policy = Literal["exact", "negotiated", "off"]
Level = Literal["required", "supported", "absent"]

_SHOWN = 8
"""Differences that a message names."""

PROTOCOL_RANGE = (1, 1)
"""(oldest, newest) version of our extensions that this release speaks."""


@final
@dataclass(frozen=True, slots=True)
class LocalOffer:
    """This engine's factors, and how strictly it takes differences.

    Attributes:
        factors: This engine's factors.
        policy: ``exact``: the hashes must be equal, as vLLM's own connector demands. ``negotiated``: factors that must
            match do; of a peer that sends no factors the hash must be equal, or explained by factors that need not
            match. ``off``: differences only warn.
        capabilities: ``required``, ``supported`` or ``absent`` by name. vLLM's own connector has none.
        hashes: Compatibility hash of the factors by dialect.
    """

    factors: Mapping[str, object] = field(default_factory=dict[str, object])
    policy: Policy = "exact"
    capabilities: Mapping[str, Level] = field(default_factory=dict[str, Level])
    hashes: Mapping[int, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_factors(self.factors)
        if self.policy not in ("exact", "negotiated", "off"):
            raise ConfigurationError("invalid-argument", f"policy {self.policy!r} is not exact, negotiated or off")
        unknown = sorted(set(self.capabilities.values()) - {"required", "supported", "absent"})
        if unknown:
            raise ConfigurationError(
                "invalid-argument", f"capability level {unknown[0]!r} is not required, supported or absent"
            )
        object.__setattr__(self, "factors", MappingProxyType(dict(self.factors)))
        object.__setattr__(self, "capabilities", MappingProxyType(dict(self.capabilities)))
        hashes = {
            version: compatibility_hash(hashed_factors(self.factors, dialect_of(version)))
            for version in range(OLDEST_DIALECT, NEWEST_DIALECT + 1)
        }
        object.__setattr__(self, "hashes", MappingProxyType(hashes))


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about one envelope.

    Attributes:
        code: Empty if the peer is accepted, else the reason's code.
        message: The reason in words, with names and values, cut where a peer could make it long.
        differences: Every factor that differs, as far as it is known.
        warnings: Texts for the operator although the peer is accepted.
        protocol: Version of our extensions to use; None with vLLM's own connector.
        capabilities: Names that both sides have.
    """

    code: str = ""
    message: str = ""
    differences: tuple[Difference, ...] = ()
    warnings: tuple[str, ...] = ()
    protocol: int | None = None
    capabilities: frozenset[str] = frozenset()

    @property
    def is_accepted(self) -> bool:
        """Whether the metadata may be opened."""
        return not self.code


def judge(offer: LocalOffer, envelope: Envelope, version: int) -> Verdict:
    """Return the decision about a peer's envelope.

    Args:
        offer: This engine's side.
        envelope: The peer's side; a refusal is judged as one.
        version: The dialect in which the peer was asked.
    """
    if envelope.refusal is not None:
        return Verdict(
            "refused", f"the peer refused: {shortened(envelope.refusal.code)}: {shortened(envelope.refusal.message)}"
        )
    protocol, problem = _common_protocol(PROTOCOL_RANGE, envelope.protocol)
    if problem:
        return Verdict("protocol-range", problem)
    capabilities, problem = _common_capabilities(offer, envelope)
    if problem:
        return Verdict("capability-missing", problem)
    code, message, differences, warnings = _compare(offer, envelope, version)
    return Verdict(code, message, differences, warnings, protocol, capabilities)


def _common_protocol(local: tuple[int, int], peer: tuple[int, int] | None) -> tuple[int | None, str]:
    if peer is None:
        return None, ""
    newest_common = min(local[1], peer[1])
    if newest_common < max(local[0], peer[0]):
        return None, f"no common protocol version: local {local[0]} to {local[1]}, peer {peer[0]} to {peer[1]}"
    return newest_common, ""


def _common_capabilities(offer: LocalOffer, envelope: Envelope) -> tuple[frozenset[str], str]:
    local, peer = set(usable_capabilities(offer.capabilities)), set(usable_capabilities(envelope.capabilities))
    for name in sorted(local - peer):
        if offer.capabilities[name] == "required":
            return frozenset(), f"this engine requires {name!r}, the peer does not have it"
    for name in sorted(peer - local):
        if envelope.capabilities[name] == "required":
            return frozenset(), f"the peer requires {shortened(name)!r}, this engine does not have it"
    return frozenset(local & peer), ""


def _compare(
    offer: LocalOffer, envelope: Envelope, version: int
) -> tuple[str, str, tuple[Difference, ...], tuple[str, ...]]:
    """Return (code, message, differences, warnings) of the comparison that the policy asks for."""
    dialect = dialect_of(version)
    local_hash = offer.hashes[version]
    is_same_hash = local_hash == envelope.compatibility_hash
    if envelope.factors:
        differences = differing_factors(offer.factors, envelope.factors)
    else:
        differences = () if is_same_hash else explain_hash(offer.factors, envelope.compatibility_hash, dialect)
    blocking = tuple(each for each in differences if each.group == "must-match")
    if offer.policy == "negotiated" and (envelope.factors or differences):
        code = "factors-differ" if blocking else ""
    elif is_same_hash:
        # Equal hashes say nothing of the factors that vLLM leaves out.
        code = "factors-differ" if blocking else ""
    else:
        code = "hash-mismatch"
    described = blocking or differences
    text = _describe(described, local_hash, envelope.compatibility_hash)
    if offer.policy == "off":
        is_different = bool(differences) or not is_same_hash
        return "", "", differences, ((f"check is off, engines differ: {text}",) if is_different else ())
    if code:
        return code, text, differences, ()
    return "", "", differences, ((f"accepted with differences: {text}",) if differences else ())


def _describe(differences: tuple[Difference, ...], local_hash: str, peer_hash: str) -> str:
    if differences:
        more = f"; {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        return "; ".join(str(each) for each in differences[:_SHOWN]) + more
    return f"local hash {local_hash}, peer hash {shortened(peer_hash)}; the peer does not send its factors"
