"""A prompt as the connector's hooks see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_scheduler_state import prompt_digest


class Prompt:
    """Tokens, or a text with one for each character, and nothing else; tokens that are added to `ids` later count, too."""

    def __init__(self, ids: Sequence[int] | str, refusal: str = "") -> None:
        self._ids = list(ids.encode()) if isinstance(ids, str) else ids
        self.refusal = refusal

    def digest(self, tokens: int) -> str | None:
        return None if self.refusal or tokens > len(self._ids) else prompt_digest(self._ids[:tokens])

    def media(self, tokens: int) -> Any:
        """Return None: the prompt has no media."""
