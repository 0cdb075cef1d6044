"""A side channel between two engines, in memory. Real sockets: integration_tests/host/inside/test_early_reads.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class InMemory:
    """Answers nothing by itself: no thread, no time."""

    port = 5600

    def __init__(self) -> None:
        self._on_ask: Callable[[int, bytes], None] | None = None
        self._on_gone: Callable[[int], None] | None = None
        self._replies: dict[int, Callable[[str, bytes], None]] = {}
        self._next_id = 0
        self.served: list[dict[Any, bytes]] = []
        self.is_closed = False

    def start(self) -> None:
        pass

    def replace(self, envelopes: Any) -> None:
        self.served.append(dict(envelopes))

    def take_asks(self, on_ask: Callable[[int, bytes], None], on_gone: Callable[[int], None], *, wait_s: float) -> None:
        self._on_ask, self._on_gone = on_ask, on_gone

    def ask(
        self, *, host: str, port: int, payload: bytes, on_reply: Callable[[str, bytes], None], deadline_s: float
    ) -> Callable[[], None]:
        self._next_id += 1
        ask_id = self._next_id
        if port != self.port or self._on_ask is None:
            on_reply("connection-refused" if port != self.port else "ask-unsupported", b"")
            return lambda: None
        self._replies[ask_id] = on_reply
        self._on_ask(ask_id, payload)

        def cancel() -> None:
            if self._replies.pop(ask_id, None) is not None and self._on_gone is not None:
                self._on_gone(ask_id)

        return cancel

    def answer(self, ask_id: int, payload: bytes) -> None:
        reply = self._replies.pop(ask_id, None)
        if reply is not None:
            reply("", payload)

    def close(self) -> None:
        self.is_closed = True
        replies, self._replies = self._replies, {}
        for ask_id, reply in replies.items():
            reply("closed", b"")
            if self._on_gone is not None:
                self._on_gone(ask_id)
