"""Early tickets, as a router inside an engine's process writes them."""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING, final

from vllm_adapter.config import load_settings
from vllm_adapter.config.secrets import configured_secrets
from vllm_adapter.wiring import prefill_request_params

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EarlyTicketWriter"]


@final
class EarlyTicketWriter:
    """Writes the params of both requests of a streamed hand-over.

    Args:
        extra: `kv_connector_extra_config` of an engine of the fleet, with its secrets.

    Raises:
        ConfigurationError: As `load_settings`; `invalid-secret` or `insecure-secret-file`.

    Attributes:
        is_streaming: Whether that engine streams.
        has_streams: Whether it also takes early tickets: something covers their addresses.
        advertised: Returns the address at which peers reach it, see `Settings.advertised`.
    """

    def __init__(self, extra: Mapping[str, object]) -> None:
        settings, _ = load_settings(extra)
        self.is_streaming = settings.streaming
        self.has_streams = settings.streaming and (settings.has_secrets or bool(settings.remote_hosts))
        self.advertised = settings.advertised
        self._secrets = configured_secrets(settings)
        # The first secret is kept after a rotation: both requests of a hand-over need one id, which no engine computes again.
        self._id_key = self._secrets.current[0] if self._secrets is not None else b""

    def hand_over_id(self, request_id: object) -> str:
        """Return the id of a request's hand-over; without the fleet secret, who knows a request's id cannot know this one."""
        return hmac.digest(self._id_key, f"kv-stream {request_id}".encode(), "sha256").hex()[:32]

    def for_prefill(self, hand_over_id: str, host: str, port: int) -> dict[str, object]:
        """Return the params of the prefill engine's request; `host` and `port` are its side channel."""
        secret: bytes | None = None
        if self._secrets is not None:
            self._secrets.changed(time.monotonic())  # secrets may rotate while requests run
            secret = self._secrets.current[0]
        return prefill_request_params((hand_over_id, host, port), secret=secret)

    def for_decode(self, hand_over_id: str, host: str, port: int) -> dict[str, object]:
        """Return the params of the decode engine's request."""
        stream = self.for_prefill(hand_over_id, host, port)["kv_stream"]
        return {"do_remote_prefill": True, "do_remote_decode": False, "kv_stream": stream}
