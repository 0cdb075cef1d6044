"""A prompt as the connector's hooks see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from kv_scheduler_state import prompt_digest

__all__ = ["Prompt"]


@final
class Prompt:
    """Tokens and nothing else; tokens that are added to `ids` later count, too."""

    refusal = ""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    def digest(self, tokens: int) -> str | None:
        return prompt_digest(self._ids[:tokens]) if tokens <= len(self._ids) else None

    def media(self, tokens: int) -> None:
        """Return None: the prompt has no media."""
