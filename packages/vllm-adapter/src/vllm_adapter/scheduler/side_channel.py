"""Ownership of this engine's side-channel listener in the scheduler's process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_adapter.ports import HandshakeListener
    from vllm_adapter.scheduler.stream_channel import StreamChannel
    from vllm_adapter.steps import Rank

__all__ = ["SideChannel"]

_logger = logging.getLogger("vllm.vllm_adapter")


@final
class SideChannel:
    """Serves the ranks' envelopes to peers from the first `serve` until `close`. Scheduler's thread only.

    Args:
        engine_id: This engine, for log lines.
        make_listener: Creates a listener that has not been started.
        streams: Receives the listener before it starts; None where nothing is streamed.
    """

    def __init__(
        self, engine_id: str, make_listener: Callable[[], HandshakeListener], streams: StreamChannel | None = None
    ) -> None:
        self._streams = streams
        self._engine_id = engine_id
        self._make_listener = make_listener
        self._listener: HandshakeListener | None = None

    @property
    def listener(self) -> HandshakeListener | None:
        """The active listener; None before the first `serve` and after `close`."""
        return self._listener

    def serve(self, envelopes: Mapping[Rank, bytes]) -> None:
        """Serve these envelopes; a port that cannot be bound stops the engine here, with the reason."""
        if self._listener is not None:
            self._listener.replace(envelopes)
            return
        listener = self._make_listener()
        listener.replace(envelopes)
        if self._streams is not None:
            self._streams.serve(listener)
        listener.start()
        self._listener = listener
        _logger.info(
            "side channel of engine %s serves %d ranks on port %d", self._engine_id, len(envelopes), listener.port
        )

    def renew(self, envelopes: Mapping[Rank, bytes]) -> None:
        """Serve the envelopes of a new registration, if a listener is active."""
        if self._listener is not None:
            self._listener.replace(envelopes)
            _logger.info("side channel of engine %s serves %d ranks anew", self._engine_id, len(envelopes))

    def close(self) -> None:
        """Stop serving; idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
