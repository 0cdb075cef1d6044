"""The package's logger behind a gate: a flood of bad messages makes few lines, each short and free of control characters."""

from __future__ import annotations

import logging
import time
from typing import final

from kv_handshake._pacing import LogGate
from kv_handshake._text import printable

__all__ = ["GatedLog"]

_logger = logging.getLogger("kv_handshake")


@final
class GatedLog:
    """Logs at most one line per topic and ten seconds."""

    def __init__(self, *, period_s: float = 10.0) -> None:
        self._gate = LogGate(period_s=period_s)

    @property
    def held_back(self) -> int:
        """Lines held back so far."""
        return self._gate.held_total

    def warning(self, topic: str, text: str) -> None:
        """Log a warning, unless one of this topic was logged a moment ago. Topics are constants, never a peer's text."""
        held = self._gate.admit(topic, time.monotonic())
        if held is not None:
            _logger.warning("%s%s", printable(text), f" ({held} more like this were not logged)" if held else "")
