"""Families of tiny models that the demo and the tests make, by name."""

from __future__ import annotations

from typing import Final

__all__ = ["FAMILIES", "families_text"]

FAMILIES: Final[dict[str, str]] = {
    "words": "a Llama trained for half a minute on this repository's documentation: text that can be read (the demo's default)",
    "dense": "a Llama with grouped queries and random weights",
    "fat": "a Llama with 131 072 bytes of cache a token and random weights (what `dev.py bench connector` runs)",
    "sliding-window": "a Gemma 3 with sliding windows in every second layer and random weights",
    "mla": "a DeepSeek V2 with latent attention, experts and random weights",
    "mla-calm": "the same without experts, with small weights",
    "mamba": "a Granite with Mamba layers between attention and random weights",
    "mamba-one-group": "the same with one group of states and small weights",
}
"""Family -> its model."""


def families_text() -> str:
    """Return a line per family."""
    width = max(map(len, FAMILIES))
    return "\n".join(f"  {name:{width}}  {about}" for name, about in FAMILIES.items())
