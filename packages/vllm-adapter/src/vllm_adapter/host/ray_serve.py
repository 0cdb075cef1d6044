"""The connector's back end for Ray Serve LLM, under the name `KVTransferConnector`.

An app file calls `register_backend()` once. From then on Ray gives each replica its host, port and engine id as under
`NixlConnector`. Where the configuration says `streaming`, Ray chooses the prefill replica first and sends each request to both
replicas at once.

Ray requests the two halves of a hand-over in two calls that share only the client's request and the prefill replica's metadata,
so the hand-over's id is a digest of the request's id (Ray gives every request one), keyed by the fleet secret. A request id that
is used twice at once gets a plain hand-over.

When two replicas work at once, Ray drops the prefill replica's answer, and with it the ticket. So both must stream. A prefill
replica that does not, or that would refuse early tickets, publishes no address, and its requests run one after the other, as
without `streaming`.

Source: `ray/llm/_internal/serve` of Ray 2.60, `engines/vllm/kv_transfer` and `serving_patterns/prefill_decode/pd_server.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast, final

from ray.llm._internal.serve.engines.vllm.kv_transfer.base import clamp_request_to_single_token
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.engines.vllm.kv_transfer.nixl import NixlConnectorBackend

from vllm_adapter.config.start_checks import PORT_VARIABLE, listening_port
from vllm_adapter.host.early_tickets import EarlyTicketWriter

if TYPE_CHECKING:
    from ray.llm._internal.serve.engines.vllm.kv_transfer.base import Request

__all__ = ["KVTransferBackend", "register_backend"]

_NAME: Final = "KVTransferConnector"
_SIDE_CHANNEL: Final = "kv_side_channel"
_logger = logging.getLogger("vllm.vllm_adapter")


def register_backend() -> None:
    """Make the back end known to all processes of the Ray cluster; safe to call more than once."""
    if not KVConnectorBackendFactory.is_registered(_NAME):
        KVConnectorBackendFactory.register_backend(_NAME, f"{__name__}:{KVTransferBackend.__name__}")


@final
class KVTransferBackend(NixlConnectorBackend):
    """Addresses replicas as under `NixlConnector`, and lets both work at once if `streaming` is on."""

    _has_address = True
    """Whether the prefill replica of the latest request has published its address."""
    _has_logged = False

    def setup(self) -> None:
        """Give this replica its host, port and engine id, as under `NixlConnector`; check an already configured port first.

        Raises:
            UnsupportedHost: `side-channel-port`: the environment's is no number.
        """
        if PORT_VARIABLE in os.environ:
            self._port()
        super().setup()

    @property
    def requires_peer_binding(self) -> bool:
        """Whether the prefill replica is chosen before anything is sent."""
        return self._tickets.has_streams

    @property
    def concurrent_handoff(self) -> bool:
        """Whether both replicas get the latest request at once; Ray checks this right after preparing the prefill request."""
        return self._tickets.has_streams and self._has_address

    def replica_metadata(self) -> dict[str, object]:
        """Tell the orchestrator where peers reach this replica's side channel; nothing if it would refuse early tickets.

        Raises:
            UnsupportedHost: `side-channel-port`: the environment's is no number.
        """
        if not self._tickets.has_streams:
            return {}
        listens_on = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"], self._port()
        return {_SIDE_CHANNEL: list(self._tickets.advertised(*listens_on, self._rank))}

    def _port(self) -> int:
        """Return the port on which the replica's engine listens.

        Ray gives each data-parallel replica the rank that becomes vLLM's `data_parallel_index`. Ray's variable already includes
        the rank (first port + rank), and the engine adds it once more, as it does to a port that was set by hand.
        """
        return listening_port(lambda: int(os.environ[PORT_VARIABLE]), self._rank)

    @property
    def _rank(self) -> int:
        kwargs: Mapping[str, object] = cast("Any", self).llm_config.engine_kwargs
        rank = kwargs.get("data_parallel_rank")
        return rank if isinstance(rank, int) and rank > 0 else 0

    def prepare_prefill_request(self, *, request: Request, peer: Mapping[str, object] | None) -> Request:
        """Return the prefill replica's request: one token, and the early ticket if the replica has published its address."""
        address = _address_of(peer)
        self._has_address = address is not None
        if address is None or not self._tickets.has_streams:
            self._tell_of_sequence()
            return super().prepare_prefill_request(request=request, peer=peer)
        asked = request.model_copy(deep=True)
        asked.kv_transfer_params = self._tickets.for_prefill(self._tickets.hand_over_id(request.request_id), *address)
        clamp_request_to_single_token(asked)
        return asked

    def prepare_decode_request(
        self, *, request: Request, peer: Mapping[str, object] | None, prefill_response: object | None
    ) -> Request:
        """Return this replica's own request: the early ticket, or the prefill replica's answer where Ray waited for it."""
        address = _address_of(peer)
        if address is None or prefill_response is not None or not self._tickets.has_streams:
            return super().prepare_decode_request(request=request, peer=peer, prefill_response=prefill_response)
        asked = request.model_copy(deep=True)
        asked.kv_transfer_params = self._tickets.for_decode(self._tickets.hand_over_id(request.request_id), *address)
        return asked

    def _tell_of_sequence(self) -> None:
        """Log once why this streaming replica reads whole prompts: its peer does not stream, or it cannot read streams itself."""
        if self._has_logged or not self._tickets.is_streaming:
            return
        self._has_logged = True
        if self._tickets.has_streams:
            _logger.warning(
                "kv-transfer: prompts are handed over whole, not streamed: the prefill replica does not have `streaming`, or has "
                "neither fleet secrets nor remote_hosts"
            )
        else:
            _logger.warning(
                "kv-transfer: prompts are handed over whole, not streamed: this decode replica has neither fleet secrets nor "
                "remote_hosts"
            )

    @cached_property
    def _tickets(self) -> EarlyTicketWriter:
        extra = cast("Mapping[str, object] | None", self.kv_transfer_config.get("kv_connector_extra_config"))
        return EarlyTicketWriter(extra or {})


def _address_of(peer: Mapping[str, object] | None) -> tuple[str, int] | None:
    """Return host and port of a prefill replica; None if it publishes none, as under another connector."""
    found: Any = peer.get(_SIDE_CHANNEL) if isinstance(peer, Mapping) else None
    match found:
        case [str() as host, int() as port]:
            return host, port
        case _:
            return None
