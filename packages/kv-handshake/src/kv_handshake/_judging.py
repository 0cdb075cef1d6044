"""The verdicts of a session: equal claims are judged once, also across the sessions of a client.

Engines of a fleet make the same claims: the first envelope of a session costs twice as much as a later one without this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_handshake._policy import Verdict, judge

if TYPE_CHECKING:
    from kv_handshake._messages import Envelope
    from kv_handshake._policy import LocalOffer
    from kv_handshake._repeated import Repeated

__all__ = ["Judge"]

_LONGEST_CHARS = 128
_MOST_CAPABILITIES = 32


@final
class Judge:
    """Judges the envelopes of one session.

    Args:
        offer: This engine's side of the comparison.
        version: The dialect in which the peer is asked.
        repeated: The values by which the session opens its envelopes.

    Attributes:
        verdict: The last verdict; empty before the first one.
    """

    __slots__ = ("_last", "_offer", "_repeated", "_version", "verdict")

    def __init__(self, offer: LocalOffer, version: int, repeated: Repeated) -> None:
        self._offer = offer
        self._version = version
        self._repeated = repeated
        self._last: Envelope | None = None
        self.verdict = Verdict()

    def judge(self, envelope: Envelope) -> Verdict:
        """Return the verdict about the envelope that the session opened last."""
        if not _is_same_claim(envelope, self._last):
            self.verdict = self._shared(envelope)
            self._last = envelope
        return self.verdict

    def _shared(self, envelope: Envelope) -> Verdict:
        """Return the client's last good verdict if it is about equal claims, else a new one.

        A verdict with differences holds a peer's words, so it is not shared.
        """
        claims = self._short_claims(envelope)
        known = self._repeated.client.good_verdict
        if claims is not None and known is not None and known[0] is self._offer and known[1] == claims:
            return known[2]
        verdict = judge(self._offer, envelope, self._version)
        if claims is not None and verdict.is_accepted and not verdict.differences and not verdict.warnings:
            self._repeated.client.good_verdict = self._offer, claims, verdict
        return verdict

    def _short_claims(self, envelope: Envelope) -> tuple[object, ...] | None:
        """Return everything that a verdict depends on, or None if it is a refusal or too long to be kept."""
        factors = self._repeated.shared_bytes("factors")
        if factors is None or envelope.refusal is not None or len(envelope.capabilities) > _MOST_CAPABILITIES:
            return None
        if any(len(text) > _LONGEST_CHARS for text in (envelope.compatibility_hash, *envelope.capabilities)):
            return None
        return self._version, factors, envelope.compatibility_hash, envelope.protocol, envelope.capabilities


def _is_same_claim(one: Envelope, other: Envelope | None) -> bool:
    """Return whether two envelopes of a session get the same verdict: only their rank and metadata differ."""
    return (
        other is not None
        and one.factors is other.factors  # equal bytes; equal values could be 1 and True
        and one.refusal is None is other.refusal
        and (one.compatibility_hash, one.protocol, one.capabilities)
        == (other.compatibility_hash, other.protocol, other.capabilities)
    )
