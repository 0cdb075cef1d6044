"""Values of a streamed hand-over: tags, messages between engines, and what becomes of a request."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

__all__ = [
    "NoReason",
    "StreamAnswer",
    "StreamOutcome",
    "StreamPart",
    "StreamQuestion",
    "StreamStanding",
    "VOID_TOKENS",
]

StreamResult: TypeAlias = Literal["read-whole", "computed-here", "given-up", "fails"]
NoReason: TypeAlias = Literal["digest-mismatch", "unknown-id", "withdrawn", "busy", "not-streamed"]

VOID_TOKENS: Final = (1 << 32) - 1
"""Progress of a tag that was voided: more than any prompt has."""


class StreamOutcome(NamedTuple):
    """Decision against streaming a prompt that came with an early ticket."""

    request_id: str
    code: str
    """`no-room`: no blocks were free in time. `over-share`: it needs more blocks than all streams together may hold.
    `other-blocks`: the peer's blocks have another size. `no-answer`: the peer was silent. `nothing-to-read`: the engine must
    compute the prompt itself. `too-many`: too many requests with an early ticket. Otherwise a `NoReason`, or the code of the
    ticket or the question that failed."""
    result: StreamResult
    """`read-whole`: the final ticket is asked for. `given-up`: after a stream that broke; the failure policy decides.
    `fails`: its images came to the peer alone, see `SchedulerState.must_fail`."""
    host: str
    port: int
    hand_over_id: str


class StreamQuestion(NamedTuple):
    """Question of a consumer about a hand-over id. The answer repeats `number`, so late answers can be told apart."""

    request_id: str
    """The consumer's own request; means nothing to the peer."""
    number: int
    host: str
    port: int
    hand_over_id: str
    digest: str
    """Digest of the consumer's own prompt, see `prompt_digest`."""
    tokens: int
    """Tokens under the digest."""
    wants_final: bool
    """Whether only the final ticket is of use, because its streams broke too often."""


class StreamAnswer(NamedTuple):
    """Answer to the asker of a question: `{"kind": "offer" | "final" | "no", ...}`, made of builtins only."""

    asker: str
    number: int
    answer: dict[str, object]


class StreamStanding(NamedTuple):
    """Standing answer to every further question for an id, whatever the engine does meanwhile; None withdraws it.

    It holds only for questions with this digest, since all others are about another prompt; an empty digest matches any. An
    offer does not answer a question that wants the final ticket.
    """

    hand_over_id: str
    digest: str
    answer: dict[str, object] | None


class StreamPart(NamedTuple):
    """Order: read the table's entries `first` to `stop - 1`, and the states and windows as well if `is_last`."""

    first: int
    stop: int
    is_last: bool
