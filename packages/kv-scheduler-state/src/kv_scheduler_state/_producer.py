"""The events of producer records: from arrival until the workers have ended the lease."""

from __future__ import annotations

from hashlib import shake_256
from typing import TYPE_CHECKING, final

from kv_scheduler_state._blocks import new_tuple
from kv_scheduler_state._config import MAX_GENERATION
from kv_scheduler_state._errors import InvalidEvent, quote
from kv_scheduler_state._fences import FencePool
from kv_scheduler_state._machine import NEW, Table, Transition, shortened
from kv_scheduler_state._outstanding import Outstanding
from kv_scheduler_state._plan import GrantOrder
from kv_scheduler_state._producer_record import ProducerRecord
from kv_scheduler_state._producer_tickets import own_address, params_template, wire_id
from kv_scheduler_state._stream_producer import StreamProducers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._blocks import BlockIds, BlockRules
    from kv_scheduler_state._config import SchedulerConfig
    from kv_scheduler_state._early_ticket import EarlyTicket
    from kv_scheduler_state._outbox import Outbox
    from kv_scheduler_state._prompt import PromptIdentity
    from kv_scheduler_state._seal import TicketSeal

__all__ = ["Producers"]


@final
class Producers:
    """Applies events to producer records and puts the resulting orders into the outbox.

    Every method asks the table before it changes anything, so a refused event leaves no trace.
    """

    __slots__ = (
        "_address",
        "_arrival",
        "_draws",
        "_handoff",
        "_has_state",
        "_nonces",
        "_on_allocate",
        "_on_preempt",
        "_readback",
        "_rules",
        "_spans",
        "_trace_length",
        "config",
        "fences",
        "gives_offers",
        "is_draining",
        "leases",
        "on_hand_over",
        "on_revoke",
        "on_sent",
        "outbox",
        "seal",
        "streams",
        "table",
    )

    def __init__(self, config: SchedulerConfig, table: Table, rules: BlockRules, outbox: Outbox) -> None:
        self.table = table
        self.on_revoke = table.on("revoke")
        self.on_sent = table.on("sent")
        self.on_hand_over = table.on("hand-over")
        self._on_allocate = table.on("allocate")
        self._on_preempt = table.on("preempt")
        self._arrival = table.on("arrive").get(NEW)
        self.fences = FencePool(config.fence_slots, config.fence_seed, config.stream_slots)
        self.streams = StreamProducers(config, outbox)
        self.config = config
        self._rules = rules
        self.outbox = outbox
        self._trace_length = config.trace_length
        self._has_state = config.has_state
        self._spans = [group.span_tokens for group in config.groups]
        self._draws = 0
        self._nonces: list[str] = []
        self.leases = Outstanding(config)
        # Set by `drain`: from then on nothing is handed over.
        self.is_draining = False
        self.gives_offers = True
        self.seal: TicketSeal | None = None
        self.set_generation(config.generation)

    def set_generation(self, generation: int | None) -> None:
        """Name this generation in tickets from now on; None names none.

        Raises:
            InvalidEvent: `invalid-event`, for a number that no consumer would accept.
        """
        if generation is not None and (type(generation) is not int or not 0 <= generation <= MAX_GENERATION):
            raise InvalidEvent(f"generation is {quote(generation)}, must be 0 to 2**53 - 1 or None")
        config = self.config
        self._address = own_address(config, generation)
        # The constant part of every ticket, and the lease that it announces.
        self._handoff = params_template(config, config.lease_s, generation, is_readback=False), config.lease_s
        readback_s = config.readback_lease_s
        self._readback = params_template(config, readback_s, generation, is_readback=True), readback_s

    def arrive(self, request_id: str, *, prompt_tokens: int, is_readback: bool, now_s: float) -> ProducerRecord:
        """Begin the life of a request that is to be handed over."""
        arrival = self._arrival or self.table.refuse(request_id, NEW, "arrive")
        return ProducerRecord(arrival, prompt_tokens, now_s, is_readback=is_readback)

    def arrive_early(
        self, request_id: str, early: EarlyTicket, digest: str, *, prompt_tokens: int, now_s: float
    ) -> ProducerRecord:
        """Begin the life of a request that a peer may read while it is computed."""
        arrival = self.table.find(request_id, NEW, "arrive-early")
        record = ProducerRecord(arrival, prompt_tokens, now_s, is_readback=False)
        self.streams.begin(request_id, early.hand_over_id, digest, record)
        return record

    def require_allocation(self, request_id: str, record: ProducerRecord, preemptions: int) -> Transition:
        """Return the row of an allocation, which may also report a preemption, see `allocate`.

        Raises:
            IllegalTransition: `illegal-transition`.
        """
        state = record.state
        if preemptions > record.preemptions and state in self._on_preempt:
            state = self._on_preempt[state].target
        return self._on_allocate.get(state) or self.table.refuse(request_id, state, "allocate")

    def allocate(self, request_id: str, record: ProducerRecord, preemptions: int, now_s: float) -> None:
        """Announce the request to the workers, once, with a fence if a slot is free; give a restart a new fence.

        A cache reset preempts outside of a step. The engine then reports the preemption with the step that has already
        allocated the request again: its count of `preemptions` is higher than the recorded one.

        Raises:
            IllegalTransition: `illegal-transition`.
        """
        if preemptions == record.preemptions:
            row = self._on_allocate.get(record.state) or self.table.refuse(request_id, record.state, "allocate")
        else:
            row = self.require_allocation(request_id, record, preemptions)
            preemption = self._on_preempt.get(record.state) if preemptions > record.preemptions else None
            record.preemptions = preemptions
            if preemption is not None:
                self.preempt(request_id, record, preemption, now_s)
                record.is_preemption_due = True
        record.advance(row, now_s)
        if "announce" in row.effects:
            record.fence = self.fences.take()
            self.outbox.expect(request_id, record.fence)
        elif "restart" in row.effects:
            record.fence = self.fences.take() if record.fence is None else self.fences.renew(record.fence[0])
            self.outbox.restart(request_id, record.fence)
        elif row.effects and not self._give_slot(request_id, record):
            record.advance(self.table.find(request_id, record.state, "no-slot"), now_s)
            record.fence = self.fences.take()
            self.outbox.expect(request_id, record.fence)

    def _give_slot(self, request_id: str, record: ProducerRecord) -> bool:
        """Give a prompt a stream slot, unless it might get no ticket at its end: an offer must be kept."""
        if record.fence is not None:
            return self.streams.give_slot(request_id, record)
        if self.is_draining or not self.gives_offers:
            return False
        if not self.leases.promise(request_id, self.streams.block_count(request_id)):
            return False
        if self.streams.give_slot(request_id, record):
            return True
        self.leases.forget_promise(request_id)
        return False

    def scheduled(
        self, request_id: str, record: ProducerRecord, row: Transition, blocks: BlockIds, now_s: float
    ) -> None:
        """Order the host-buffer save of a chunk."""
        record.advance(row, now_s)
        if not self.config.uses_host_buffer:
            return
        if "save" in row.effects and any(blocks):
            self.outbox.save(request_id, blocks)
            record.saved_blocks += sum(map(len, blocks))
        if "complete" in row.effects:
            self.outbox.complete(request_id)

    def computed(
        self,
        request_id: str,
        record: ProducerRecord,
        row: Transition,
        block_ids: Sequence[Sequence[int]],
        tokens: int,
        held_tokens: int,
    ) -> None:
        """Order the stream words of a scheduled chunk, and offer the prompt with its first chunk."""
        if self.streams.scheduled(request_id, row, block_ids, tokens, held_tokens):
            self.streams.offer(request_id, self._offer(request_id, record))

    def _offer(self, request_id: str, record: ProducerRecord) -> dict[str, object]:
        """Return the ticket of an offer: a plain ticket without block ids."""
        params, lease_s = self._handoff
        streams, groups = self.streams, len(self._spans)
        nonce = streams.nonce_of(request_id)
        if not nonce:
            nonce = self._nonces.pop() if self._nonces else self._draw_nonce()
            streams.keep_nonce(request_id, nonce)
        no_blocks: list[list[int]] = [[] for _ in range(groups)]
        offer: dict[str, object] = {
            **params,
            "remote_block_ids": no_blocks,
            "kv_first_tokens": [0] * groups,
            "remote_request_id": wire_id(request_id),
            "remote_num_tokens": record.prompt_tokens,
            "kv_span_tokens": self._spans.copy(),
            "kv_nonce": nonce,
            "kv_fence": list(record.fence or ()),
            "kv_prompt": streams.digest_of(request_id),
            "kv_lease_s": lease_s,
        }
        media = streams.media_of(request_id)
        if media is not None:
            offer["kv_media"] = list(media)
        return self._sealed(offer)

    def _final(
        self,
        request_id: str,
        record: ProducerRecord,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        identity: PromptIdentity | None,
    ) -> dict[str, object]:
        """Return the ticket of a streamed prompt, under the nonce of its offers."""
        row = self.on_hand_over["prefilled"]
        params = self.ticket(request_id, record, row, block_ids, computed_tokens, identity) or {}
        nonce = self.streams.nonce_of(request_id)
        if nonce:
            params["kv_nonce"] = nonce
            params = self._sealed(params)
        self.streams.finalise(request_id, params)
        return params

    def _sealed(self, params: dict[str, object]) -> dict[str, object]:
        if self.seal is not None:
            params["kv_seal"] = self.seal.of_params(params, self._address)
        return params

    def preempt(self, request_id: str, record: ProducerRecord, row: Transition, now_s: float) -> None:
        """Apply a preemption: void the stream, and drop the saves of blocks that are gone."""
        record.advance(row, now_s)
        if "void" in row.effects:
            self.streams.end(request_id, row, ends=False)
        record.trace = shortened(record.trace, self._trace_length)
        if "forget-saves" in row.effects:
            self.outbox.drop_saves(request_id)
            record.saved_blocks = 0
        record.is_void = False

    def void(self, request_id: str, record: ProducerRecord, now_s: float) -> None:
        """Revoke the lease, or exclude everything computed so far from being handed over."""
        revoke = self.on_revoke.get(record.state)
        if revoke is not None:
            self.revoke(request_id, record, revoke, now_s)
        record.is_void = record.state in {"prefilling", "prefilled", "offered", "complete", "stale", "plain"}
        reset = self.table.on("reset").get(record.state)
        if reset is not None:
            record.advance(reset, now_s)
            self.streams.end(request_id, reset, ends=False)

    def ending(
        self,
        request_id: str,
        record: ProducerRecord,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        *,
        withhold: bool,
    ) -> tuple[Transition, str]:
        """Return the row for a prompt that ended well, and a refusal code, which is empty if the prompt is handed over.

        Raises:
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`, for a wrong number of groups.
        """
        code = "withheld" if withhold else "cache-reset" if record.is_void else "" if any(block_ids) else "no-blocks"
        if not code:
            if len(block_ids) != len(self._spans):
                self._rules.require_groups(block_ids)
            state = record.state
            row = self.on_hand_over.get(state) or self.table.refuse(request_id, state, "hand-over")
            code = self._refusal(record, block_ids, computed_tokens)
            if not code:
                return row, ""
        return self.table.find(request_id, record.state, "drop"), code

    def _refusal(self, record: ProducerRecord, block_ids: Sequence[Sequence[int]], computed_tokens: int) -> str:
        """Return the code of the reason why this engine cannot hand over blocks now, empty if it can."""
        # "complete": offered while it was computed, and its lease is promised. A refusal now could fail its reader.
        if record.state != "complete":
            if self.is_draining:
                return "draining"
            if self.leases.has_quota and not self.leases.has_room(block_ids):
                return "lease-quota"
        if record.fence is None and self.fences.slots:
            return "no-fence-slot"
        if self._has_state and computed_tokens > self._tokens_of(record, computed_tokens):
            return "state-too-long"
        return ""

    def _tokens_of(self, record: ProducerRecord, computed_tokens: int) -> int:
        """Return the number of tokens that a ticket promises; for a prefill, never more than its prompt."""
        prompt_tokens = record.prompt_tokens
        return computed_tokens if record.is_readback or computed_tokens < prompt_tokens else prompt_tokens

    def ticket(
        self,
        request_id: str,
        record: ProducerRecord,
        row: Transition,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        identity: PromptIdentity | None,
    ) -> dict[str, object] | None:
        """Return the params of the ticket, or None for a row that grants none; `finish` then grants the lease."""
        if "grant" not in row.effects:
            if "finalise" in row.effects:
                return self._final(request_id, record, block_ids, computed_tokens, identity)
            return None
        template, _ = self._readback if record.is_readback else self._handoff
        fence, tokens = record.fence, computed_tokens
        if tokens > record.prompt_tokens:
            tokens = self._tokens_of(record, tokens)
        params = template.copy()
        params["remote_block_ids"], params["kv_first_tokens"] = self._rules.offered(block_ids, tokens)
        params["remote_request_id"] = wire_id(request_id)
        params["remote_num_tokens"] = tokens
        params["kv_span_tokens"] = self._spans.copy()
        params["kv_nonce"] = self._nonces.pop() if self._nonces else self._draw_nonce()
        if fence is not None:
            params["kv_fence"] = list(fence)
        if identity is not None:
            params["kv_prompt"] = "" if identity.refusal else identity.digest(tokens) or ""
            media = identity.media(tokens)
            if media is not None and media[0]:
                params["kv_media"] = list(media)
        if self.seal is not None:
            params["kv_seal"] = self.seal.of_params(params, self._address)
        return params

    def finish(
        self,
        request_id: str,
        record: ProducerRecord,
        row: Transition,
        block_ids: Sequence[Sequence[int]],
        params: dict[str, object] | None,
        now_s: float,
    ) -> None:
        """End the request: grant the lease of its ticket, or let the workers forget the request."""
        record.advance(row, now_s)
        if params is None:
            if "withdraw" in row.effects:
                self._withdraw(request_id, record)
            if "refuse" in row.effects:
                self.streams.end(request_id, row, ends=True)
            return
        _, lease_s = self._readback if record.is_readback else self._handoff
        outbox = self.outbox
        outbox.grants.append(new_tuple(GrantOrder, (request_id, lease_s, record.fence, params["kv_nonce"])))
        outbox.has_orders = True
        self.leases.grant(request_id, record, block_ids)

    def revoke(self, request_id: str, record: ProducerRecord, row: Transition, now_s: float) -> None:
        """Order the early end of a lease."""
        record.advance(row, now_s)
        self.streams.revoked(request_id)
        if "order-revoke" in row.effects:
            self.outbox.add(self.outbox.revokes, request_id)

    def sent(self, request_id: str, record: ProducerRecord, row: Transition, now_s: float) -> None:
        """Take back the fence slot of a lease that every worker has ended."""
        record.advance(row, now_s)
        self.leases.end(request_id, record)
        if "return-slot" in row.effects and record.fence is not None:
            self.fences.give_back(record.fence[0])
            record.fence = None
        elif "give-back" in row.effects:
            plain_slot = self.streams.sent(request_id, record)
            if plain_slot is not None:
                self.fences.give_back(plain_slot)

    def _withdraw(self, request_id: str, record: ProducerRecord) -> None:
        if not self.outbox.withdraw(request_id):
            self.outbox.add(self.outbox.releases, request_id)
        # Return the slot without waiting for the workers: no ticket was written, so no reader trusts the old word, and the
        # workers apply the orders of the slot's next owner after this one's.
        if record.fence is not None:
            self.fences.give_back(record.fence[0])
            record.fence = None

    def _draw_nonce(self) -> str:
        """Return a fresh nonce of 16 hexadecimal digits; one digest of the secret and a counter makes 64 of them."""
        config = self.config
        self._draws += 1
        digits = shake_256(f"{config.nonce_seed}/{config.engine_id}/{self._draws}".encode()).hexdigest(64 * 8)
        self._nonces = [digits[at : at + 16] for at in range(0, 64 * 16, 16)]
        return self._nonces.pop()
