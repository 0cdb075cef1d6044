"""Sanitising of texts from clients and peers for a log or a terminal."""

from __future__ import annotations

__all__ = ["plain_text", "short_text"]

_MOST_CHARS = 2000


def plain_text(text: str) -> str:
    """Return a text with its control characters escaped, because they could start another line or command a terminal."""
    return text if text.isprintable() else "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])


def short_text(text: str) -> str:
    """Return a plain text of at most 2000 characters, with a note of its length if it was longer."""
    plain = plain_text(text[:_MOST_CHARS])[:_MOST_CHARS]
    return plain if len(text) <= _MOST_CHARS else f"{plain}... ({len(text)} characters)"
