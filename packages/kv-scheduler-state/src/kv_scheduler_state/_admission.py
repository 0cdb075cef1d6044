"""Admission of requests that come with `kv_transfer_params`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast, final

from kv_scheduler_state._decisions import BYSTANDER, Admission
from kv_scheduler_state._early_admission import EarlyAdmissions
from kv_scheduler_state._early_ticket import EARLY_KEY, is_withdrawal
from kv_scheduler_state._errors import TicketError, quote
from kv_scheduler_state._prompt import missing_media
from kv_scheduler_state._ticket_reader import TicketReader

if TYPE_CHECKING:
    from kv_scheduler_state._consumer import Consumers
    from kv_scheduler_state._producer import Producers
    from kv_scheduler_state._prompt import PromptIdentity
    from kv_scheduler_state._request import Request
    from kv_scheduler_state._seal import TicketSeal
    from kv_scheduler_state._ticket import HandoffTicket, TicketKind
    from kv_scheduler_state._ticket_reader import Fields

__all__ = ["Admissions"]

_MOST_TOKENS: Final = 1 << 31
_PRODUCER: Final = Admission("producer")
_CONSUMER: Final = Admission("consumer")
_EARLY_CONSUMER: Final = Admission("consumer", is_early=True)


@final
class Admissions:
    """Reads a request's ticket once, verifies that it belongs to the prompt, and gives the request its records."""

    __slots__ = (
        "_config",
        "_consumers",
        "_is_bidirectional",
        "_producers",
        "_reserved",
        "_tickets",
        "early",
        "seal",
    )

    def __init__(self, consumers: Consumers, producers: Producers) -> None:
        config = producers.config
        self._consumers = consumers
        self._producers = producers
        self._config = config
        self._is_bidirectional = config.bidirectional
        self._reserved = config.reserved_id_prefixes
        self._tickets = TicketReader(config)
        self.early = EarlyAdmissions(consumers, producers, self._tickets)
        self.seal: TicketSeal | None = None

    def admit(
        self, request_id: str, request: Request, params: object, identity: PromptIdentity | None, at_s: float
    ) -> Admission:
        """Give a request the records that its params ask for; a bad ticket only costs it the consumer record."""
        try:
            fields = self._tickets.fields_of(params)
            kind = self._tickets.kind_of(fields)
            if kind == "handoff":
                ticket = self._verified(request_id, request, fields, kind, identity)
                prompt_tokens = request.prompt_tokens
                request.consumer = self._consumers.arrive(request_id, ticket, prompt_tokens, at_s)
                if self._is_bidirectional and not request_id.startswith(self._reserved):
                    request.producer = self._producers.arrive(
                        request_id, prompt_tokens=prompt_tokens, is_readback=True, now_s=at_s
                    )
                return _CONSUMER
        except TicketError as error:
            return self._early_or_refused(request_id, request, params, identity, error)
        if kind == "none":
            return BYSTANDER
        if self._reserved and request_id.startswith(self._reserved):
            request.rejected_code = "ticket-id-reserved"
            self.early.decline(fields)
            message = (
                f"request id {quote(request_id)} begins like a notification of another kind, so no reader could name it"
            )
            return Admission("none", "ticket-id-reserved", message)
        kept_tokens, truncate_tokens = request.prompt_tokens, self._config.left_tokens(request.prompt_tokens)
        if kept_tokens <= truncate_tokens:
            truncate_tokens = 0
        kept_tokens -= truncate_tokens
        early = self._early_producer(request_id, request, fields, identity, truncate_tokens)
        if early is not None:
            return early
        request.producer = self._producers.arrive(request_id, prompt_tokens=kept_tokens, is_readback=False, now_s=at_s)
        if kind == "readback":
            try:
                ticket = self._verified(request_id, request, fields, kind, identity)
            except TicketError as error:
                refusal = _missing_media(fields, identity) or error
                request.rejected_code = refusal.code
                return Admission("producer", refusal.code, str(refusal), truncate_tokens)
            request.consumer = self._consumers.arrive(request_id, ticket, kept_tokens, at_s)
        return Admission("producer", "", "", truncate_tokens) if truncate_tokens else _PRODUCER

    def _withdrawn(self, request: Request, fields: Fields) -> Admission:
        """Admit the request by which a router withdraws a hand-over; it takes part in none itself."""
        try:
            self.early.withdraw(fields)
        except TicketError as error:
            request.rejected_code = error.code
            return Admission("none", error.code, str(error))
        return BYSTANDER

    def _early_producer(
        self, request_id: str, request: Request, fields: Fields, identity: PromptIdentity | None, truncate_tokens: int
    ) -> Admission | None:
        """Admit a prompt to be streamed or, where its early ticket is refused, to be handed over whole.

        None for a request without an early ticket, or for one that reads besides: its ticket is no early one.
        """
        if EARLY_KEY not in fields:
            return None
        if is_withdrawal(fields):
            return self._withdrawn(request, fields)
        if fields.get("remote_block_ids"):
            self.early.decline(fields)
            return None
        tokens, now_s = request.prompt_tokens - truncate_tokens, request.born_s
        try:
            request.producer = self.early.producer(request_id, fields, tokens, identity, now_s)
        except TicketError as error:
            request.rejected_code = error.code
            request.producer = self._producers.arrive(request_id, prompt_tokens=tokens, is_readback=False, now_s=now_s)
            return Admission("producer", error.code, str(error), truncate_tokens)
        return Admission("producer", "", "", truncate_tokens, is_early=True)

    def _early_or_refused(
        self, request_id: str, request: Request, params: object, identity: PromptIdentity | None, error: TicketError
    ) -> Admission:
        """Admit a request whose ticket could not be read because it is yet to come; refuse any other with the error."""
        error = _missing_media(params, identity) or error
        fields = _early_fields(params)
        if fields is not None:
            try:
                request.consumer = self.early.consumer(
                    request_id, fields, request.prompt_tokens, identity, request.born_s
                )
            except TicketError as early_error:
                error = early_error
            else:
                return BYSTANDER if request.consumer is None else _EARLY_CONSUMER
        request.rejected_code = error.code
        return Admission("none", error.code, str(error))

    def _verified(
        self, request_id: str, request: Request, fields: Fields, kind: TicketKind, identity: PromptIdentity | None
    ) -> HandoffTicket:
        """Return the ticket if it was written for this prompt, or by a peer that binds no prompts.

        Any other ticket whose seal proves its writer is released there: nothing of it will be read.

        Raises:
            TicketError: as `TicketReader.read`; `ticket-role`, `ticket-seal`, `ticket-own-engine`, `ticket-prompt`,
                `ticket-prompt-unidentified`, or the code of `identity.refusal`.
        """
        self.early.require_reader()
        tickets, seal = self._tickets, self.seal
        ticket = tickets.ticket_of(fields, kind) if seal is None else seal.opened(tickets, fields, kind)
        self.early.require_other_engine(ticket)
        try:
            _require_prompt(ticket, identity)
        except TicketError:
            # Without a seal a client may have made the ticket up, so no connection is made for it.
            if seal is not None and fields.get("kv_seal") is not None:
                self._consumers.decline(request_id, ticket, request.prompt_tokens, request.born_s)
            raise
        return ticket


def _require_prompt(ticket: HandoffTicket, identity: PromptIdentity | None) -> None:
    """Refuse a ticket of another prompt.

    Raises:
        TicketError: `ticket-prompt`, `ticket-prompt-unidentified`, or the code of `identity.refusal`.
    """
    if identity is not None and identity.refusal:
        raise TicketError(
            identity.refusal, "this engine cannot tell which prompt this is, so no ticket can be checked against it"
        )
    prompt = ticket.prompt
    if prompt is None:
        return
    if not prompt:
        raise TicketError(
            "ticket-prompt-unidentified",
            "the engine that wrote the ticket could not tell which prompt it had computed",
        )
    tokens = ticket.peer_tokens
    digest = None if identity is None or tokens is None else identity.digest(tokens)
    if digest != prompt:
        raise TicketError(
            "ticket-prompt",
            f"the ticket is of another prompt: kv_prompt is {prompt[:16]}..., the first {tokens} tokens of this request are "
            f"{'not identified' if digest is None else digest[:16] + '...'}",
            field="kv_prompt",
        )


def _missing_media(params: object, identity: PromptIdentity | None) -> TicketError | None:
    """Return the error for a refused ticket whose prompt cannot be computed here either, whatever else is wrong with it."""
    fields: Fields = cast("Fields", params) if isinstance(params, dict) else {}
    tokens: object = fields.get("remote_num_tokens")
    if identity is None or not fields.get("kv_media") or not isinstance(tokens, int | float):
        return None
    if not 0 <= tokens <= _MOST_TOKENS:
        return None
    digest = identity.digest(int(tokens))
    if digest is not None and digest == fields.get("kv_prompt"):
        return None  # the same media, whatever they are
    return missing_media(fields["kv_media"], identity.media(int(tokens)) or (0, digest))


def _early_fields(params: object) -> Fields | None:
    """Return params that ask to read a prompt with no other ticket than an early one, else None."""
    if not isinstance(params, dict):
        return None
    fields = cast("Fields", params)
    is_alone = EARLY_KEY in fields and fields.get("remote_block_ids") is None
    is_read = fields.get("do_remote_prefill") is True and not fields.get("do_remote_decode")
    return fields if is_alone and is_read else None
