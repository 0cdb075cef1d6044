"""Side channels between two engines: in memory, and over real ZeroMQ on loopback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kv_handshake import Client, Codec, Listener, LocalOffer
from kv_handshake.testing import sample_metadata


class Wire(Protocol):
    """A side channel between two engines."""

    @property
    def port(self) -> int: ...
    @property
    def envelope(self) -> bytes: ...

    def listener(self) -> Any: ...
    def start(self) -> None: ...
    def client(self) -> Any: ...
    def close(self) -> None: ...


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

    def listener(self) -> InMemory:
        return self

    def client(self) -> InMemory:
        return self

    def start(self) -> None:
        pass

    @property
    def envelope(self) -> bytes:
        return b"envelope"

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


class OverZeroMq:
    """A real listener and a real client on loopback."""

    def __init__(self) -> None:
        self.envelope = Codec(capabilities={"ask": "supported"}).encode_envelope(
            sample_metadata(), {"model": "m"}, dialect=14, rank=(0, 0)
        )
        self._listener = Listener("127.0.0.1", 0, payloads={(0, 0): self.envelope})
        self._client = Client(LocalOffer(factors={"model": "m"}))

    @property
    def port(self) -> int:
        return self._listener.port

    def listener(self) -> Listener:
        return self._listener

    def start(self) -> None:
        self._listener.start()

    def client(self) -> Client:
        return self._client

    def close(self) -> None:
        self._client.close()
        self._listener.close()
