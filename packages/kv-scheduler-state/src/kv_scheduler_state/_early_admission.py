"""Admission of requests with an early ticket, and of the peers' answers for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state._early_ticket import EARLY_KEY, is_withdrawal, named_id, read_early
from kv_scheduler_state._errors import TicketError, quote
from kv_scheduler_state._stream_values import stream_tag
from kv_scheduler_state._ticket_reader import TicketReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_scheduler_state._consumer import ConsumerRecord, Consumers
    from kv_scheduler_state._consumer_record import ConsumedStream
    from kv_scheduler_state._producer import Producers
    from kv_scheduler_state._producer_record import ProducerRecord
    from kv_scheduler_state._prompt import PromptIdentity
    from kv_scheduler_state._seal import TicketSeal
    from kv_scheduler_state._ticket import HandoffTicket
    from kv_scheduler_state._ticket_reader import Fields

__all__ = ["EarlyAdmissions"]


@final
class EarlyAdmissions:
    """Reads early tickets and answers, trusting nothing."""

    __slots__ = ("_config", "_consumers", "_offers", "_producers", "_tickets", "seal")

    def __init__(self, consumers: Consumers, producers: Producers, tickets: TicketReader) -> None:
        self._config = producers.config
        self._consumers = consumers
        self._producers = producers
        self._tickets = tickets
        self._offers = TicketReader(producers.config, takes_offers=True)
        self.seal: TicketSeal | None = None

    def require_reader(self) -> None:
        """Refuse a ticket of any kind on an engine that must not read.

        Raises:
            TicketError: `ticket-role`.
        """
        if not self._config.reads:
            raise TicketError(
                "ticket-role",
                "this engine only produces KV and reads none: send this request to an engine that decodes (kv_role 'kv_consumer' "
                "or 'kv_both')",
            )

    def require_other_engine(self, ticket: HandoffTicket) -> None:
        """Refuse a ticket of this engine, as when a router sends both requests of a hand-over to one engine.

        Raises:
            TicketError: `ticket-own-engine`.
        """
        if ticket.peer.engine_id == self._config.engine_id:
            raise TicketError(
                "ticket-own-engine",
                f"the ticket is of this very engine ({quote(ticket.peer.engine_id)}), which cannot read from itself",
                field="remote_engine_id",
            )

    def producer(
        self, request_id: str, fields: Fields, tokens: int, identity: PromptIdentity | None, now_s: float
    ) -> ProducerRecord:
        """Begin to stream a prompt. If that is refused, the prompt is handed over whole, and questions for its id are declined.

        Raises:
            TicketError: as `read_early`; `ticket-early-off`, `ticket-early-shared`, `ticket-prompt-unidentified`, or the code of
                `identity.refusal`.
        """
        try:
            early = read_early(fields, self._tickets.hosts, self.seal)
            digest = self._streamable_digest(early.hand_over_id, tokens, identity)
        except TicketError:
            self.decline(fields)
            raise
        record = self._producers.arrive_early(request_id, early, digest, prompt_tokens=tokens, now_s=now_s)
        self._producers.streams.keep_media(request_id, None if identity is None else identity.media(tokens))
        return record

    def withdraw(self, fields: Fields) -> None:
        """Refuse questions for the id of a prompt that its router says will not come; a prompt that is here goes on.

        Raises:
            TicketError: as `read_early`.
        """
        early = read_early(fields, self._tickets.hosts, self.seal)
        self._producers.streams.decline(early.hand_over_id, "withdrawn")

    def decline(self, fields: Fields) -> None:
        """Refuse questions for the id of an early ticket that this engine does not follow.

        The peer may accept what this engine refuses, and would then ask for the id until it gives up.
        """
        named = named_id(fields, self.seal)
        if named:
            self._producers.streams.decline(named)

    def _streamable_digest(self, hand_over_id: str, tokens: int, identity: PromptIdentity | None) -> str:
        """Return the digest under which a prompt may be streamed from here.

        Raises:
            TicketError: as `producer`.
        """
        if not self._config.stream_slots:
            raise TicketError(
                "ticket-early-off",
                "this engine streams no prompt while it computes it: streaming is off here",
                field=EARLY_KEY,
            )
        if not self._producers.streams.may_begin(hand_over_id):
            raise TicketError(
                "ticket-early-shared",
                f"another request of this engine is streamed as hand-over {quote(hand_over_id)}, which serves one reader",
                field=EARLY_KEY,
            )
        return _digest(tokens, identity)

    def consumer(
        self, request_id: str, fields: Fields, prompt_tokens: int, identity: PromptIdentity | None, now_s: float
    ) -> ConsumerRecord | None:
        """Begin to ask a peer for a prompt that it computes at the same time; None if this engine computes the prompt itself.

        Raises:
            TicketError: as `read_early`; `ticket-role`, `ticket-flags`, `ticket-early-off`, `ticket-early-shared`,
                `ticket-prompt-unidentified`, or the code of `identity.refusal`.
        """
        self.require_reader()
        early = read_early(fields, self._tickets.hosts, self.seal)
        if is_withdrawal(fields):
            raise TicketError(
                "ticket-flags", "a hand-over is withdrawn at the engine that computes the prompt", field="withdraw"
            )
        if not self._config.reads_streams:
            raise TicketError(
                "ticket-early-off",
                "this engine reads no prompt while its peer computes it: streaming is off here, or stream_reserve_fraction "
                "leaves streams no block",
                field=EARLY_KEY,
            )
        if self._consumers.streams.reads(early.hand_over_id):
            raise TicketError(
                "ticket-early-shared",
                f"another request of this engine reads hand-over {quote(early.hand_over_id)}, which serves one reader",
                field=EARLY_KEY,
            )
        code = self._consumers.why_not_early(prompt_tokens)
        if code:
            self._consumers.streams.note_local(request_id, early, code)
            return None
        tokens = max(0, prompt_tokens - self._config.left_tokens(prompt_tokens))
        digest = _digest(tokens, identity)
        record = self._consumers.arrive_early(request_id, early, digest, prompt_tokens, now_s)
        record.stream.media = (None if identity is None else identity.media(tokens)) or (0, digest)
        return record

    def opened(self, stream: ConsumedStream, answer: Mapping[str, object]) -> HandoffTicket:
        """Return the validated ticket of an offer or a final answer.

        Raises:
            TicketError: as `TicketReader.read`; `ticket-seal`, `ticket-own-engine`, `ticket-prompt`, `ticket-missing` or
                `ticket-range`.
        """
        is_offer = answer["kind"] == "offer"
        reader, seal = self._offers if is_offer else self._tickets, self.seal
        fields = reader.fields_of(answer["ticket"])
        if reader.kind_of(fields) != "handoff":
            raise TicketError("ticket-flags", "the ticket of the answer hands nothing over", field="ticket")
        ticket = reader.ticket_of(fields, "handoff") if seal is None else seal.opened(reader, fields, "handoff")
        self.require_other_engine(ticket)
        self._consumers.streams.require_ticket(stream, ticket, is_offer=is_offer)
        slot, generation = ticket.fence or (0, 0)
        told = answer["request_id"], answer["slot"], answer["generation"], answer.get("tag", stream_tag(generation))
        if told != (ticket.peer_request_id, slot, generation, stream_tag(generation)):
            raise TicketError(
                "ticket-range",
                f"the answer for {quote(stream.early.hand_over_id)} and its ticket differ",
                field="fence",
            )
        return ticket


def _digest(tokens: int, identity: PromptIdentity | None) -> str:
    """Return the digest of a request's first tokens.

    Raises:
        TicketError: `ticket-prompt-unidentified`, or the code of `identity.refusal`.
    """
    if identity is not None and identity.refusal:
        raise TicketError(identity.refusal, "this engine cannot tell which prompt this is, so it cannot stream it")
    digest = None if identity is None or not tokens else identity.digest(tokens)
    if not digest:
        raise TicketError("ticket-prompt-unidentified", f"the first {tokens} tokens of this request are not identified")
    return digest
