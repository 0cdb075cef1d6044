"""Texts of clients and peers, made fit for a log or a terminal."""

from __future__ import annotations

__all__ = ["plain_text"]


def plain_text(text: str) -> str:
    """Return a text without control characters, which could begin another line or command a terminal: they are escaped."""
    return text if text.isprintable() else "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])
