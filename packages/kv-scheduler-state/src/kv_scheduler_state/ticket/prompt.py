"""The digest that binds a ticket to a prompt.

Layout of the bytes under SHA-256 (integers are little-endian):

| part | bytes |
|---|---|
| tag | `kv-prompt-1` and one zero byte |
| tokens | count (8 bytes), then every token id as a signed integer of 8 bytes |
| media | count (8), then for each item its hash (length 8, UTF-8), first token (8) and number of tokens (8) |
| lora, salt, embeds | length (8) and UTF-8 bytes of each |

Example: the tokens 1, 2, 3 and nothing else are 12 + 8 + 24 + 8 + 3 * 8 = 76 bytes.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol, cast, final

from kv_scheduler_state.errors import InvalidEvent, TicketError, quote
from kv_scheduler_state.ticket.ticket import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "MEDIA_MISSING",
    "UNBOUND",
    "PromptIdentity",
    "TextPrompt",
    "missing_media",
    "prompt_digest",
    "require_identity",
]

MEDIA_MISSING: Final = "ticket-media-missing"


class PromptIdentity(Protocol):
    """Computes the digest of a request's prompt."""

    @property
    def refusal(self) -> str:
        """Ticket code of the reason why this engine cannot identify the prompt; empty if it can."""
        ...

    def digest(self, tokens: int) -> str | None:
        """Return the digest of the first `tokens` tokens, None if the request has fewer or cannot be identified."""
        ...

    def media(self, tokens: int) -> tuple[int, str] | None:
        """Return how many images, videos and sounds begin among the first `tokens` tokens, and the digest without them.

        None if there are none. Items that this engine could not compute the prompt with do not count.
        """
        ...


def require_identity(identity: object) -> None:
    """Refuse an argument that identifies no prompt.

    Raises:
        InvalidEvent: `invalid-event`.
    """
    is_named = isinstance(getattr(identity, "refusal", None), str) and not isinstance(identity, type)
    if not is_named or not (callable(getattr(identity, "digest", None)) and callable(getattr(identity, "media", None))):
        raise InvalidEvent(
            f"identity is {quote(identity)}, must be a PromptIdentity such as TextPrompt(token_ids); UNBOUND opts out of binding "
            "tickets to prompts"
        )


def missing_media(named: object, own: tuple[int, str | None]) -> TicketError | None:
    """Return the error for a prompt that this engine cannot compute; None for all others.

    In some fleets only the engine that prefills gets the images. A text computed here would not have seen them.

    Args:
        named: Number of images, videos and sounds in the prompt that a peer computed, and its digest without them; not checked.
        own: The same of this engine's own request.
    """
    if not isinstance(named, list | tuple) or len(cast("list[object]", named)) != 2:
        return None
    count, digest = cast("list[object]", named)
    if not isinstance(count, int | float) or not own[0] < count or digest is None or digest != own[1]:
        return None
    return TicketError(
        MEDIA_MISSING,
        f"the prompt has {quote(count)} images, videos or sounds, and {own[0]} of them came with this request; send the image or "
        "its uuid to decode, too",
        field="kv_media",
    )


def prompt_digest(
    token_ids: Iterable[int],
    *,
    lora: str = "",
    media: Sequence[tuple[str, int, int]] = (),
    salt: str = "",
    embeds: str = "",
) -> str:
    """Return the digest of a prompt as 64 hexadecimal digits.

    Args:
        token_ids: Exactly the tokens whose KV is handed over.
        lora: Identity of the adapter, such as its name and a digest of its content; empty for the base model.
        media: (content hash, first token, number of tokens) of each image, video or audio that begins among the tokens, in
            order of position.
        salt: The request's cache salt.
        embeds: Digest of prompt embeddings that stand in for tokens; empty for none.
    """
    tokens = array("q", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    items = [field for item in media for field in item]
    return sha256(
        encode("kv-prompt-1", len(tokens), tokens.tobytes(), len(media), *items, lora, salt, embeds)
    ).hexdigest()


@dataclass(frozen=True)
class TextPrompt:
    """The identity of a prompt of tokens alone, without images, videos, sounds or embeddings.

    Attributes:
        token_ids: All its tokens, and those that were generated if their KV is handed over, too.
        lora: Identity of the adapter, see `prompt_digest`.
        salt: The request's cache salt.
        refusal: Empty: such a prompt can be identified.
    """

    token_ids: Sequence[int]
    lora: str = ""
    salt: str = ""
    refusal: str = field(default="", init=False)

    def digest(self, tokens: int) -> str | None:
        """Return the digest of the first `tokens` tokens, None if there are fewer."""
        if tokens > len(self.token_ids):
            return None
        # A host may have None for an adapter or a salt that is not given.
        return prompt_digest(self.token_ids[:tokens], lora=self.lora or "", salt=self.salt or "")

    def media(self, tokens: int) -> None:
        """Return None: there are no media."""


@final
class _Unbound(TextPrompt):
    def __reduce__(self) -> str:
        return "UNBOUND"  # copies and pickles are the same object, which is how it is recognised


UNBOUND: Final[PromptIdentity] = _Unbound(())
"""Opts out of binding: a ticket that is written with it serves any prompt, and a bound ticket is refused to it."""
