"""The decision whether two engines may exchange KV cache, made from an envelope before its metadata is opened."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

from kv_handshake.errors import ConfigurationError, require, shortened
from kv_handshake.wire.dialects import NEWEST_DIALECT, OLDEST_DIALECT, dialect_of
from kv_handshake.wire.factors import (
    Difference,
    check_factors,
    differing_factors,
    explain_hash,
    hash_with_declared,
    wire_hash,
)
from kv_handshake.wire.messages import usable_capabilities

if TYPE_CHECKING:
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
        policy: ``exact``: the hashes must be equal, as vLLM's own connector demands, apart from `may_differ`. ``negotiated``:
            factors that must match do; of a peer that sends no factors the hash must be equal, or explained by factors that
            need not match. ``off``: differences only warn.
        may_differ: Names of factors that may differ or be absent, where the peer sends its factors: its own ones, not known to
            every engine; ``vllm_version``, up to its patch level; with ``nixl_connector_version`` beside it both, whatever they
            are; ``cache_dtype``, by an engine that casts elements. Any other factor of its own must match, also if only one side
            sends it; other names in `FACTOR_GROUPS` keep their meaning.
        capabilities: ``required``, ``supported`` or ``absent`` by name. vLLM's own connector has none.
        hashes: Compatibility hash of the factors by dialect.
    """

    factors: Mapping[str, object] = field(default_factory=dict[str, object])
    policy: Policy = "exact"
    capabilities: Mapping[str, Level] = field(default_factory=dict[str, Level])
    may_differ: Collection[str] = ()
    hashes: Mapping[int, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(Mapping, factors=self.factors, capabilities=self.capabilities)
        require((tuple, list, set, frozenset), may_differ=self.may_differ)
        # Copied, so that the hashes stay those of the factors.
        object.__setattr__(self, "factors", dict(self.factors))
        object.__setattr__(self, "capabilities", dict(self.capabilities))
        check_factors(self.factors)
        if self.policy not in ("exact", "negotiated", "off"):
            raise ConfigurationError("invalid-argument", f"policy {self.policy!r} is not exact, negotiated or off")
        unknown = [level for level in self.capabilities.values() if level not in ("required", "supported", "absent")]
        if unknown:
            raise ConfigurationError(
                "invalid-argument", f"capability level {unknown[0]!r} is not required, supported or absent"
            )
        hashes = {
            version: wire_hash(self.factors, dialect_of(version))
            for version in range(OLDEST_DIALECT, NEWEST_DIALECT + 1)
        }
        object.__setattr__(self, "hashes", hashes)


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about one envelope.

    Attributes:
        code: Empty if the peer is accepted, else the reason's code.
        message: The reason in words, with names and values, cut where a peer could make it long.
        differences: Every factor that differs, as far as it is known.
        warnings: Texts for the operator although the peer is accepted.
    """

    code: str = ""
    message: str = ""
    differences: tuple[Difference, ...] = ()
    warnings: tuple[str, ...] = ()

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
    oldest, newest = PROTOCOL_RANGE
    if envelope.protocol is not None and (envelope.protocol[0] > newest or envelope.protocol[1] < oldest):
        peer_oldest, peer_newest = envelope.protocol
        problem = f"no common protocol version: local {oldest} to {newest}, peer {peer_oldest} to {peer_newest}"
        return Verdict("protocol-range", problem)
    problem = _missing_capability(offer, envelope)
    if problem:
        return Verdict("capability-missing", problem)
    local_hash, peer_hash = offer.hashes[version], envelope.compatibility_hash
    is_same_hash = local_hash == peer_hash
    differences: tuple[Difference, ...] = ()
    if envelope.factors:
        differences = differing_factors(offer.factors, envelope.factors, offer.may_differ)
        declared = hash_with_declared(offer.factors, envelope.factors, offer.may_differ, dialect_of(version))
        is_same_hash = peer_hash == declared
    elif not is_same_hash:
        differences = explain_hash(offer.factors, peer_hash, dialect_of(version))
    blocking = tuple(each for each in differences if each.group == "must-match")
    text = _describe(blocking or differences, local_hash, peer_hash)
    code = ""
    if not is_same_hash and (offer.policy != "negotiated" or not (envelope.factors or differences)):
        code = "hash-mismatch"
    elif blocking:  # equal hashes say nothing of the factors that vLLM leaves out
        code = "factors-differ"
    if code and offer.policy != "off":
        return Verdict(code, text, differences)
    cause = "check is off, engines differ" if offer.policy == "off" else "accepted with differences"
    return Verdict("", "", differences, (f"{cause}: {text}",) if code or differences else ())


def _missing_capability(offer: LocalOffer, envelope: Envelope) -> str:
    local, peer = set(usable_capabilities(offer.capabilities)), set(usable_capabilities(envelope.capabilities))
    for name in sorted(local - peer):
        if offer.capabilities[name] == "required":
            return f"this engine requires {name!r}, the peer does not have it"
    for name in sorted(peer - local):
        if envelope.capabilities[name] == "required":
            return f"the peer requires {shortened(name)!r}, this engine does not have it"
    return ""


def _describe(differences: tuple[Difference, ...], local_hash: str, peer_hash: str) -> str:
    if differences:
        more = f"; {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        return "; ".join(str(each) for each in differences[:_SHOWN]) + more
    return f"local hash {local_hash}, peer hash {shortened(peer_hash)}; the peer does not send its factors"
