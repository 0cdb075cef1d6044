"""The events of producer records: from arrival until the workers have ended the lease."""

from __future__ import annotations

from hashlib import shake_256
from typing import TYPE_CHECKING, Final, cast, final

from kv_scheduler_state.config import MAX_GENERATION
from kv_scheduler_state.errors import InvalidEvent, quote
from kv_scheduler_state.fences import FencePool, Outstanding
from kv_scheduler_state.plan import GrantOrder
from kv_scheduler_state.records import ProducerRecord
from kv_scheduler_state.streams.producer import StreamProducers
from kv_scheduler_state.tables import NEW, PRODUCER_TABLE, STREAM_PRODUCER_TABLE, Table, Transition
from kv_scheduler_state.ticket.prompt import UNBOUND
from kv_scheduler_state.ticket.ticket import HandoffTicket, PeerAddress, params_template, wire_id
from kv_scheduler_state.values import BlockList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state.clock import ObservedClock
    from kv_scheduler_state.config import SchedulerConfig
    from kv_scheduler_state.plan import Outbox
    from kv_scheduler_state.ticket.early import EarlyTicket
    from kv_scheduler_state.ticket.prompt import PromptIdentity
    from kv_scheduler_state.ticket.seal import TicketSeal
    from kv_scheduler_state.ticket.ticket import TicketKind
    from kv_scheduler_state.values import BlockRules

__all__ = ["Producers"]

_TABLE: Final = Table("producer", (*PRODUCER_TABLE.rows, *STREAM_PRODUCER_TABLE.rows))


@final
class Producers:
    """Applies events to producer records and puts the resulting orders into the outbox.

    Every method asks the table before it changes anything, so a refused event changes nothing.
    """

    def __init__(self, config: SchedulerConfig, rules: BlockRules, outbox: Outbox, clock: ObservedClock) -> None:
        self.table = _TABLE
        self.fences = FencePool(config.fence_slots, config.fence_seed, config.stream_slots)
        self.streams = StreamProducers(config, outbox, clock)
        self.config = config
        self._rules = rules
        self.outbox = outbox
        self._spans = tuple([group.span_tokens for group in config.groups])
        self._draws = 0
        self._nonces: list[str] = []
        self._has_state = config.has_state
        self.leases = Outstanding(config)
        # Set by `drain`: from then on nothing is handed over.
        self.is_draining = False
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
        sizes = config.tp, config.pp, config.dcp
        self._address = PeerAddress(config.engine_id, config.host, config.port, *sizes, generation, config.dialect)
        null = config.null_block
        self._template = params_template("handoff", self._address, config.lease_s, null)
        self._readback_template = params_template("readback", self._address, config.readback_lease_s, null)

    def arrive(self, request_id: str, *, prompt_tokens: int, is_readback: bool) -> ProducerRecord:
        """Begin the life of a request that is to be handed over."""
        arrival = self.table.find(request_id, NEW, "arrive")
        return ProducerRecord(request_id, arrival.target, prompt_tokens, is_readback=is_readback)

    def arrive_early(
        self, request_id: str, early: EarlyTicket, digest: str, media: tuple[int, str] | None, *, prompt_tokens: int
    ) -> ProducerRecord:
        """Begin the life of a request that a peer may read while it is computed."""
        arrival = self.table.find(request_id, NEW, "arrive-early")
        record = ProducerRecord(request_id, arrival.target, prompt_tokens)
        self.streams.begin(record, early.hand_over_id, digest, media)
        return record

    def allocate(self, record: ProducerRecord, preemptions: int) -> None:
        """Announce the request to the workers, once, with a fence if a slot is free; give a restart a new fence.

        A cache reset preempts outside of a step. The engine then reports the preemption with the step that has already
        allocated the request again: its count of `preemptions` is higher than the recorded one.

        Raises:
            IllegalTransition: `illegal-transition`.
        """
        preemption, row = self.rows_of_allocation(record, preemptions)
        record.preemptions = preemptions
        if preemption is not None:
            self.preempt(record, preemption)
            record.is_preemption_due = True
        record.state = row.target
        if "announce" in row.effects:
            record.fence = self.fences.take()
            self.outbox.announce("expects", record.request_id, record.fence)
        elif "restart" in row.effects:
            record.fence = self.fences.take() if record.fence is None else self.fences.renew(record.fence[0])
            self.outbox.announce("restarts", record.request_id, record.fence)
        elif row.effects and not self._give_slot(record):
            record.state = self.table.find(record.request_id, record.state, "no-slot").target
            record.fence = self.fences.take()
            self.outbox.announce("expects", record.request_id, record.fence)

    def rows_of_allocation(self, record: ProducerRecord, preemptions: int) -> tuple[Transition | None, Transition]:
        """Return the rows of the preemption that an allocation reports, if it does, and of the allocation itself.

        Raises:
            IllegalTransition: `illegal-transition`.
        """
        preemption = self.table.get(record.state, "preempt") if preemptions > record.preemptions else None
        state = record.state if preemption is None else preemption.target
        return preemption, self.table.find(record.request_id, state, "allocate")

    def _give_slot(self, record: ProducerRecord) -> bool:
        """Give a prompt a stream slot, unless it might get no ticket at its end: an offer must be kept."""
        is_offered = record.fence is not None  # it starts again
        if not is_offered and not self.is_draining and self.streams.gives_offers:
            places = self.streams.find(record.request_id, "allocate").places
            is_offered = self.leases.promise(record.request_id, places.total)
        if is_offered and self.streams.give_slot(record):
            return True
        self.leases.forget_promise(record.request_id)
        return False

    def scheduled(
        self,
        record: ProducerRecord,
        new_block_ids: Sequence[Sequence[int]],
        touched_block_ids: Sequence[Sequence[int]],
        *,
        is_last: bool,
        tokens: int,
        held_tokens: int,
    ) -> None:
        """Order the host-buffer save of a chunk, and the words of its stream; offer the prompt with its first chunk.

        Raises:
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`, for a wrong number of groups.
        """
        row = self.table.find(record.request_id, record.state, "last-chunk" if is_last else "chunk")
        blocks = self._rules.chunk(touched_block_ids)
        record.state = row.target
        if self.config.uses_host_buffer:
            if "save" in row.effects and any(blocks):
                saves = self.outbox.orders["saves"]
                saves[record.request_id] = (*saves.get(record.request_id, ()), (record.request_id, blocks))
            if "complete" in row.effects:
                self.outbox.orders["completes"][record.request_id] = record.request_id
        if "publish" in row.effects:
            self.streams.scheduled(record.request_id, row, new_block_ids, tokens, held_tokens)
        if "open" in row.effects:
            self.streams.publish("offer", record.request_id, self._offer(record))

    def _offer(self, record: ProducerRecord) -> dict[str, object]:
        """Return the ticket of an offer: a plain ticket without block ids."""
        stream = self.streams.find(record.request_id, "offer")
        stream.nonce = stream.nonce or self._draw_nonce()
        no_blocks = tuple([BlockList((), 0, self.config.null_block) for _ in self._spans])
        return self._written(record, no_blocks, record.prompt_tokens, stream.nonce, stream.digest, stream.media)

    def _written(
        self,
        record: ProducerRecord,
        blocks: tuple[BlockList, ...],
        tokens: int,
        nonce: str,
        prompt: str | None,
        media: tuple[int, str] | None,
    ) -> dict[str, object]:
        """Return the params of a ticket of this engine, sealed if there is a secret."""
        request_id, fence = wire_id(record.request_id), record.fence
        params: dict[str, object] = {
            **(self._readback_template if record.is_readback else self._template),
            "remote_block_ids": [list(each.ids) for each in blocks],
            "remote_request_id": request_id,
            "remote_num_tokens": tokens,
            "kv_nonce": nonce,
            "kv_first_tokens": [each.first_token for each in blocks],
            "kv_span_tokens": list(self._spans),
        }
        if fence is not None:
            params["kv_fence"] = list(fence)
        if prompt is not None:
            params["kv_prompt"] = prompt
        if media is not None and media[0]:
            params["kv_media"] = list(media)
        if self.seal is not None:
            kind: TicketKind = "readback" if record.is_readback else "handoff"
            lease_s = cast("float", params["kv_lease_s"])
            promise = tokens, lease_s, fence, nonce, prompt, self._spans
            ticket = HandoffTicket(kind, self._address, request_id, blocks, *promise, transfer_mode="pull")
            params["kv_seal"] = self.seal.of(ticket)
        return params

    def preempt(self, record: ProducerRecord, row: Transition) -> None:
        """Apply a preemption: void the stream, and drop the saves of blocks that are gone."""
        record.state = row.target
        if "void" in row.effects:
            self.streams.end(record.request_id, row, ends=False)
        if "forget-saves" in row.effects:
            self.outbox.orders["saves"].pop(record.request_id, None)
            self.outbox.orders["completes"].pop(record.request_id, None)
        record.is_void = False

    def void(self, record: ProducerRecord) -> None:
        """Revoke the lease, or exclude everything computed so far from being handed over."""
        self.revoke(record)
        record.is_void = record.state in {"prefilling", "prefilled", "offered", "complete", "stale", "plain"}
        reset = self.table.get(record.state, "reset")
        if reset is not None:
            record.state = reset.target
            self.streams.end(record.request_id, reset, ends=False)

    def ending(
        self,
        record: ProducerRecord,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        identity: PromptIdentity,
        *,
        withhold: bool,
    ) -> tuple[Transition, str, dict[str, object] | None]:
        """Return the row for a prompt that ended well, and a refusal code or the params of its ticket; `finish` grants the lease.

        Raises:
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`, for a wrong number of groups.
        """
        code = "withheld" if withhold else "cache-reset" if record.is_void else "" if any(block_ids) else "no-blocks"
        if not code:
            self._rules.require_groups(block_ids)
            row = self.table.find(record.request_id, record.state, "hand-over")
            code = self._refusal(record, block_ids, computed_tokens)
            if not code:
                return row, "", self._ticket(record, row, block_ids, computed_tokens, identity)
        return self.table.find(record.request_id, record.state, "drop"), code, None

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

    def _ticket(
        self,
        record: ProducerRecord,
        row: Transition,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        identity: PromptIdentity,
    ) -> dict[str, object]:
        tokens = self._tokens_of(record, computed_tokens)
        prompt, media = None, None
        if identity is not UNBOUND:
            prompt, media = "" if identity.refusal else identity.digest(tokens) or "", identity.media(tokens)
        # The tickets of a streamed prompt have the nonce of its offers.
        nonce = self.streams.find(record.request_id, "hand-over").nonce if "finalise" in row.effects else ""
        blocks = self._rules.offered(block_ids, tokens)
        return self._written(record, blocks, tokens, nonce or self._draw_nonce(), prompt, media)

    def finish(
        self,
        record: ProducerRecord,
        row: Transition,
        block_ids: Sequence[Sequence[int]],
        params: dict[str, object] | None,
    ) -> None:
        """End the request: grant the lease of its ticket, or let the workers forget the request."""
        record.state = row.target
        if params is None:
            if "withdraw" in row.effects:
                self._withdraw(record)
            if "refuse" in row.effects:
                self.streams.end(record.request_id, row, ends=True)
            return
        lease_s, nonce = cast("float", params["kv_lease_s"]), str(params["kv_nonce"])
        self.outbox.orders["grants"][record.request_id] = GrantOrder(record.request_id, lease_s, record.fence, nonce)
        self.leases.grant(record, block_ids)
        if "finalise" in row.effects:
            self.streams.publish("final", record.request_id, params)

    def revoke(self, record: ProducerRecord) -> bool:
        """Order the early end of a lease; return False for a request that has none."""
        row = self.table.get(record.state, "revoke")
        if row is None:
            return False
        record.state = row.target
        self.streams.revoked(record.request_id)
        self.outbox.orders["revokes"][record.request_id] = record.request_id
        return True

    def sent(self, record: ProducerRecord) -> None:
        """Take back the fence slot of a lease, or of a void stream, that every worker has ended.

        Raises:
            IllegalTransition: `illegal-transition`.
        """
        row = self.table.find(record.request_id, record.state, "sent")
        record.state = row.target
        self.leases.end(record)
        if "give-back" in row.effects:
            self.streams.forget(self.streams.find(record.request_id, "sent"))
        self._return_slot(record)

    def _withdraw(self, record: ProducerRecord) -> None:
        self.outbox.withdraw(record.request_id)
        # Return the slot without waiting for the workers: no ticket was written, so no reader trusts the old word, and the
        # workers apply the orders of the slot's next owner after this one's.
        self._return_slot(record)

    def _return_slot(self, record: ProducerRecord) -> None:
        if record.fence is not None:
            slot, record.fence = record.fence[0], None
            (self.fences if slot >= self.config.stream_slots else self.streams.fences).give_back(slot)

    def _draw_nonce(self) -> str:
        """Return a fresh nonce of 16 hexadecimal digits; one digest of the secret and a counter makes 64 of them."""
        if not self._nonces:
            config = self.config
            self._draws += 1
            digits = shake_256(f"{config.nonce_seed}/{config.engine_id}/{self._draws}".encode()).hexdigest(64 * 8)
            self._nonces = [digits[at : at + 16] for at in range(0, 64 * 16, 16)]
        return self._nonces.pop()
