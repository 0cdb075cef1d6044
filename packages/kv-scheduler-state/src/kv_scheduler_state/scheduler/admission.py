"""Admission: reads a request's `kv_transfer_params` once, and gives the request its records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast, final

from kv_scheduler_state.errors import TicketError, quote
from kv_scheduler_state.fences import stream_tag
from kv_scheduler_state.ticket.early import EARLY_KEY, EarlyTicket, is_withdrawal, named_id, read_early
from kv_scheduler_state.ticket.prompt import missing_media
from kv_scheduler_state.ticket.reader import TicketReader
from kv_scheduler_state.values import BYSTANDER, Admission

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_scheduler_state.records import ConsumedStream, ConsumerRecord, Request
    from kv_scheduler_state.scheduler.consumer import Consumers
    from kv_scheduler_state.scheduler.producer import Producers
    from kv_scheduler_state.ticket.prompt import PromptIdentity
    from kv_scheduler_state.ticket.reader import Fields
    from kv_scheduler_state.ticket.seal import TicketSeal
    from kv_scheduler_state.ticket.ticket import HandoffTicket, TicketKind

__all__ = ["Admissions"]

_MOST_TOKENS: Final = 1 << 31


@final
class Admissions:
    """Reads a request's ticket once, verifies that it belongs to the prompt, and gives the request its records."""

    def __init__(self, consumers: Consumers, producers: Producers) -> None:
        config = producers.config
        self._consumers = consumers
        self._producers = producers
        self._config = config
        self._reserved = config.reserved_id_prefixes
        self._tickets = TicketReader(config)
        self._offers = TicketReader(config, takes_offers=True)
        self.seal: TicketSeal | None = None

    def admit(self, request_id: str, request: Request, params: object, identity: PromptIdentity) -> Admission:
        """Give a request the records that its params ask for; a bad ticket only costs it the consumer record."""
        try:
            kind = self._tickets.classify(params)
            fields = cast("Fields", params)
            if kind == "handoff":
                ticket = self._verified(request_id, request, fields, kind, identity)
                prompt_tokens = request.prompt_tokens
                request.consumer = self._consumers.arrive(request_id, ticket, prompt_tokens)
                if self._config.bidirectional and not request_id.startswith(self._reserved):
                    request.producer = self._producers.arrive(request_id, prompt_tokens=prompt_tokens, is_readback=True)
                return Admission("consumer")
        except TicketError as error:
            return self._early_or_refused(request_id, request, params, identity, error)
        if kind == "none":
            return BYSTANDER
        if request_id.startswith(self._reserved):
            self._decline(fields)
            problem = f"{quote(request_id)} begins like a notification of another kind, so no reader could name it"
            return Admission("none", "ticket-id-reserved", f"request id {problem}")
        left_tokens = self._config.left_tokens(request.prompt_tokens)
        truncate_tokens = left_tokens if left_tokens < request.prompt_tokens else 0
        kept_tokens = request.prompt_tokens - truncate_tokens
        if EARLY_KEY in fields:
            early = self._early_producer(request_id, request, fields, identity, truncate_tokens)
            if early is not None:
                return early
        request.producer = self._producers.arrive(request_id, prompt_tokens=kept_tokens, is_readback=False)
        if kind == "readback":
            try:
                ticket = self._verified(request_id, request, fields, kind, identity)
            except TicketError as error:
                refusal = _missing_media(fields, identity) or error
                return Admission("producer", refusal.code, refusal.message, truncate_tokens)
            request.consumer = self._consumers.arrive(request_id, ticket, kept_tokens)
        return Admission("producer", "", "", truncate_tokens)

    def _early_producer(
        self, request_id: str, request: Request, fields: Fields, identity: PromptIdentity, truncate_tokens: int
    ) -> Admission | None:
        """Admit a prompt to be streamed or, where its early ticket is refused, to be handed over whole.

        Return None for a request that reads as well: its ticket is not an early one.
        """
        if is_withdrawal(fields):
            try:
                withdrawn = read_early(fields, self._tickets.hosts, self.seal)
            except TicketError as error:
                return Admission("none", error.code, error.message)
            # A prompt that is here goes on; questions for an id that will not come are refused.
            self._producers.streams.decline(withdrawn.hand_over_id, "withdrawn")
            return BYSTANDER
        if fields.get("remote_block_ids"):
            self._decline(fields)
            return None
        tokens = request.prompt_tokens - truncate_tokens
        try:
            early, digest = self._streamable(fields, tokens, identity)
        except TicketError as error:
            self._decline(fields)
            request.producer = self._producers.arrive(request_id, prompt_tokens=tokens, is_readback=False)
            return Admission("producer", error.code, error.message, truncate_tokens)
        media = identity.media(tokens)
        request.producer = self._producers.arrive_early(request_id, early, digest, media, prompt_tokens=tokens)
        return Admission("producer", "", "", truncate_tokens, is_early=True)

    def _early_or_refused(
        self, request_id: str, request: Request, params: object, identity: PromptIdentity, error: TicketError
    ) -> Admission:
        """Admit a request whose ticket could not be read because it is yet to come; refuse any other with the error."""
        error = _missing_media(params, identity) or error
        fields: Fields = cast("Fields", params) if isinstance(params, dict) else {}
        is_alone = EARLY_KEY in fields and fields.get("remote_block_ids") is None and error.code != "ticket-key"
        if is_alone and fields.get("do_remote_prefill") is True and not fields.get("do_remote_decode"):
            try:
                request.consumer = self._streaming_consumer(request_id, fields, request.prompt_tokens, identity)
            except TicketError as early_error:
                error = early_error
            else:
                return BYSTANDER if request.consumer is None else Admission("consumer", is_early=True)
        return Admission("none", error.code, error.message)

    def _verified(
        self, request_id: str, request: Request, fields: Fields, kind: TicketKind, identity: PromptIdentity
    ) -> HandoffTicket:
        """Return the ticket if it was written for this prompt, or by a peer that binds no prompts.

        Any other ticket whose seal proves its writer is released there: nothing of it will be read.

        Raises:
            TicketError: as `TicketReader.read`; `ticket-role`, `ticket-seal`, `ticket-own-engine`, `ticket-prompt`,
                `ticket-prompt-unidentified`, or the code of `identity.refusal`.
        """
        if not self._config.reads:
            raise _reads_nothing()
        ticket = self._read(self._tickets, fields, kind)
        try:
            _require_prompt(ticket, identity)
        except TicketError:
            # Without a seal a client may have made the ticket up, so no connection is made for it.
            if self.seal is not None and fields.get("kv_seal") is not None:
                self._consumers.give_up(self._consumers.arrive(request_id, ticket, request.prompt_tokens))
            raise
        return ticket

    def _read(self, reader: TicketReader, fields: Fields, kind: TicketKind) -> HandoffTicket:
        """Return a ticket of another engine, its seal verified.

        Raises:
            TicketError: as `TicketReader.read`; `ticket-seal`; `ticket-own-engine`, as when a router sends both requests of a
                hand-over to one engine.
        """
        ticket = reader.read(fields, kind) if self.seal is None else self.seal.opened(reader, fields, kind)
        if ticket.peer.engine_id == self._config.engine_id:
            engine = quote(ticket.peer.engine_id)
            problem = f"the ticket is of this very engine ({engine}), which cannot read from itself"
            raise TicketError("ticket-own-engine", problem, field="remote_engine_id")
        return ticket

    # ---- early tickets

    def _decline(self, fields: Fields) -> None:
        """Refuse questions for the id of an early ticket that this engine does not follow.

        The peer may accept what this engine refuses, and would then ask for the id until it gives up.
        """
        named = named_id(fields, self.seal)
        if named:
            self._producers.streams.decline(named)

    def _streamable(self, fields: Fields, tokens: int, identity: PromptIdentity) -> tuple[EarlyTicket, str]:
        """Return the early ticket under which a prompt may be streamed from here, and the digest of the prompt.

        Raises:
            TicketError: as `read_early`; `ticket-early-off`, `ticket-early-shared`, `ticket-prompt-unidentified`, or the code of
                `identity.refusal`.
        """
        early = read_early(fields, self._tickets.hosts, self.seal)
        if not self._config.stream_slots:
            problem = "streaming is off here"
            raise TicketError("ticket-early-off", f"this engine streams no prompt while it computes it: {problem}")
        if not self._producers.streams.may_begin(early.hand_over_id):
            raise _shared(early.hand_over_id, "is streamed as")
        return early, _digest(tokens, identity)

    def _streaming_consumer(
        self, request_id: str, fields: Fields, prompt_tokens: int, identity: PromptIdentity
    ) -> ConsumerRecord | None:
        """Begin to ask a peer for a prompt that it computes at the same time; None if this engine computes the prompt itself.

        Raises:
            TicketError: as `read_early`; `ticket-role`, `ticket-flags`, `ticket-early-off`, `ticket-early-shared`,
                `ticket-prompt-unidentified`, or the code of `identity.refusal`.
        """
        if not self._config.reads:
            raise _reads_nothing()
        early = read_early(fields, self._tickets.hosts, self.seal)
        if is_withdrawal(fields):
            raise TicketError("ticket-flags", "a hand-over is withdrawn at the engine that computes the prompt")
        if not self._config.reads_streams:
            problem = "streaming is off here, or stream_reserve_fraction leaves streams no block"
            raise TicketError("ticket-early-off", f"this engine reads no prompt while its peer computes it: {problem}")
        if self._consumers.streams.reads(early.hand_over_id):
            raise _shared(early.hand_over_id, "reads")
        tokens = max(0, prompt_tokens - self._config.left_tokens(prompt_tokens))
        # The peer leaves that many tokens; if more must stay unread, it gives up a needed block when it finishes the prompt,
        # possibly before that block is read.
        is_unreadable = not tokens or prompt_tokens - self._config.unread_tokens(prompt_tokens) < tokens
        if is_unreadable or self._consumers.streams.is_full:
            code = "nothing-to-read" if is_unreadable else "too-many"
            self._consumers.streams.note_local(request_id, early, code)
            return None
        digest = _digest(tokens, identity)
        media = identity.media(tokens) or (0, digest)
        return self._consumers.arrive_early(request_id, early, digest, media, prompt_tokens)

    def opened(self, stream: ConsumedStream, answer: Mapping[str, object]) -> HandoffTicket:
        """Return the validated ticket of an offer or a final answer.

        Raises:
            TicketError: as `TicketReader.read`; `ticket-seal`, `ticket-own-engine`, `ticket-prompt`, `ticket-missing` or
                `ticket-range`.
        """
        is_offer = answer["kind"] == "offer"
        reader = self._offers if is_offer else self._tickets
        fields = cast("Fields", answer["ticket"])
        if reader.classify(fields) != "handoff":
            raise TicketError("ticket-flags", "the ticket of the answer hands nothing over", field="ticket")
        ticket = self._read(reader, fields, "handoff")
        if ticket.prompt != stream.digest or ticket.peer_tokens != stream.offered_tokens:
            hand_over = quote(stream.early.hand_over_id)
            raise TicketError("ticket-prompt", f"the answer for hand-over {hand_over} is of another prompt")
        if is_offer and ticket.fence is None:
            raise TicketError("ticket-missing", "the offer names no fence", field="kv_fence")
        slot, generation = ticket.fence or (0, 0)
        named = answer["request_id"], answer["slot"], answer["generation"], answer.get("tag", stream_tag(generation))
        if named != (ticket.peer_request_id, slot, generation, stream_tag(generation)):
            raise TicketError(
                "ticket-range", f"the answer for {quote(stream.early.hand_over_id)} and its ticket differ"
            )
        return ticket


def _reads_nothing() -> TicketError:
    return TicketError(
        "ticket-role",
        "this engine only produces KV and reads none: send this request to an engine that decodes (kv_role 'kv_consumer' or "
        "'kv_both')",
    )


def _shared(hand_over_id: str, verb: str) -> TicketError:
    return TicketError(
        "ticket-early-shared",
        f"another request of this engine {verb} hand-over {quote(hand_over_id)}, which serves one reader",
        field=EARLY_KEY,
    )


def _require_prompt(ticket: HandoffTicket, identity: PromptIdentity) -> None:
    """Refuse a ticket of another prompt.

    Raises:
        TicketError: `ticket-prompt`, `ticket-prompt-unidentified`, or the code of `identity.refusal`.
    """
    if identity.refusal:
        raise TicketError(
            identity.refusal, "this engine cannot tell which prompt this is, so no ticket can be checked against it"
        )
    prompt = ticket.prompt
    if prompt is None:
        return
    if not prompt:
        raise TicketError(
            "ticket-prompt-unidentified", "the engine that wrote the ticket could not tell which prompt it had computed"
        )
    tokens = ticket.peer_tokens
    digest = None if tokens is None else identity.digest(tokens)
    if digest != prompt:
        raise TicketError(
            "ticket-prompt",
            f"the ticket is of another prompt: kv_prompt is {prompt[:16]}..., the first {tokens} tokens of this request are "
            f"{'not identified' if digest is None else digest[:16] + '...'}",
            field="kv_prompt",
        )


def _missing_media(params: object, identity: PromptIdentity) -> TicketError | None:
    """Return the error for a refused ticket whose prompt cannot be computed here either, whatever else is wrong with it."""
    fields: Fields = cast("Fields", params) if isinstance(params, dict) else {}
    tokens: object = fields.get("remote_num_tokens")
    if not fields.get("kv_media") or not isinstance(tokens, int | float):
        return None
    if not 0 <= tokens <= _MOST_TOKENS:
        return None
    digest = identity.digest(int(tokens))
    if digest is not None and digest == fields.get("kv_prompt"):
        return None  # the same media, whatever they are
    return missing_media(fields["kv_media"], identity.media(int(tokens)) or (0, digest))


def _digest(tokens: int, identity: PromptIdentity) -> str:
    """Return the digest of a request's first tokens.

    Raises:
        TicketError: `ticket-prompt-unidentified`, or the code of `identity.refusal`.
    """
    if identity.refusal:
        raise TicketError(identity.refusal, "this engine cannot tell which prompt this is, so it cannot stream it")
    digest = identity.digest(tokens) if tokens else None
    if not digest:
        raise TicketError("ticket-prompt-unidentified", f"the first {tokens} tokens of this request are not identified")
    return digest
