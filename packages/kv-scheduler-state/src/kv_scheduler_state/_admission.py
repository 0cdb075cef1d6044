"""What becomes of a request that comes with `kv_transfer_params`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state._decisions import BYSTANDER, Admission
from kv_scheduler_state._errors import TicketError
from kv_scheduler_state._hosts import HostPolicy
from kv_scheduler_state._ticket_reader import TicketReader

if TYPE_CHECKING:
    from kv_scheduler_state._config import SchedulerConfig
    from kv_scheduler_state._consumer import ConsumerDesk
    from kv_scheduler_state._live import Live
    from kv_scheduler_state._producer import ProducerDesk

__all__ = ["AdmissionDesk"]

_PRODUCER: Final = Admission("producer")
_CONSUMER: Final = Admission("consumer")


@final
class AdmissionDesk:
    """Reads a request's ticket once and gives the request its halves."""

    __slots__ = ("_backoff_tokens", "_consumers", "_is_bidirectional", "_producers", "_tickets")

    def __init__(self, config: SchedulerConfig, consumers: ConsumerDesk, producers: ProducerDesk) -> None:
        self._consumers = consumers
        self._producers = producers
        self._backoff_tokens = config.backoff_tokens
        self._is_bidirectional = config.bidirectional
        self._tickets = TicketReader(
            groups=len(config.groups),
            limits=config.limits,
            hosts=HostPolicy(config.peer_networks, config.peer_hosts),
            reads_back=config.bidirectional,
        )

    def admit(self, request_id: str, live: Live, params: object, prompt_tokens: int, at_s: float) -> Admission:
        """Give a request the halves that its params ask for; a bad ticket only costs it the consumer's half."""
        try:
            fields = self._tickets.fields_of(params)
            kind = self._tickets.kind_of(fields)
            if kind == "handoff":
                ticket = self._tickets.ticket_of(fields, kind)
                live.consumer = self._consumers.arrive(request_id, ticket, prompt_tokens, at_s)
                if self._is_bidirectional:
                    live.producer = self._producers.arrive(request_id, is_readback=True, now_s=at_s)
                return _CONSUMER
        except TicketError as error:
            live.rejected_code = error.code
            return Admission("none", error.code, str(error))
        if kind == "none":
            return BYSTANDER
        live.producer = self._producers.arrive(request_id, is_readback=False, now_s=at_s)
        backoff = self._backoff_tokens
        truncate_tokens = backoff if prompt_tokens > backoff else 0
        if kind == "readback":
            try:
                ticket = self._tickets.ticket_of(fields, kind)
            except TicketError as error:
                live.rejected_code = error.code
                return Admission("producer", error.code, str(error), truncate_tokens)
            live.consumer = self._consumers.arrive(request_id, ticket, prompt_tokens - truncate_tokens, at_s)
        return Admission("producer", "", "", truncate_tokens) if truncate_tokens else _PRODUCER
