"""Texts that a peer may have written, made short and harmless."""

from __future__ import annotations

__all__ = ["printable", "shortened"]

_SHORT_CHARS = 200


def shortened(text: str, most_chars: int = _SHORT_CHARS) -> str:
    """Return a printable text of at most so many characters, and a note of its length if it was longer.

    Characters that are not printable become escapes: a newline would fake a log line, and an escape sequence would reach a
    terminal.
    """
    kept = text[:most_chars]
    if not kept.isprintable():
        kept = "".join(char if char.isprintable() else repr(char)[1:-1] for char in kept)
    return kept if len(text) <= most_chars else f"{kept}... ({len(text)} characters)"


def printable(text: str, *, most_chars: int = 1000) -> str:
    """Return a text on one line, at most so long, with escapes for everything that is not printable."""
    return shortened(text, most_chars)
