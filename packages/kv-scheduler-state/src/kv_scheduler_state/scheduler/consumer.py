"""The consumer record of a request in the scheduler process: from a valid ticket until its read has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state.errors import InvalidEvent, quote
from kv_scheduler_state.plan import ReadOrder
from kv_scheduler_state.records import UNRESERVED, ConsumedStream, ConsumerRecord
from kv_scheduler_state.scheduler.sharing import HandOvers, Heartbeats, key_of
from kv_scheduler_state.streams.consumer import StreamConsumers
from kv_scheduler_state.tables import CONSUMER_TABLE, NEW, STREAM_CONSUMER_TABLE, Table, Transition
from kv_scheduler_state.ticket.ticket import HandoffTicket, PeerAddress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_scheduler_state.clock import ObservedClock
    from kv_scheduler_state.config import SchedulerConfig
    from kv_scheduler_state.plan import Outbox
    from kv_scheduler_state.records import Request
    from kv_scheduler_state.ticket.early import EarlyTicket
    from kv_scheduler_state.values import BlockList, BlockRules

__all__ = ["Consumers"]

_TABLE: Final = Table("consumer", (*CONSUMER_TABLE.rows, *STREAM_CONSUMER_TABLE.rows))


@final
class Consumers:
    """Applies events to consumer records and puts the resulting orders into the outbox.

    Every method asks the table before it changes anything, so a refused event changes nothing.
    """

    def __init__(self, config: SchedulerConfig, rules: BlockRules, outbox: Outbox, clock: ObservedClock) -> None:
        self.table = _TABLE
        # The event that stands for a failed read under the failure policy.
        self.failure_event = "broken" if config.load_failure_policy == "recompute" else "broken-for-good"
        self._has_state = config.has_state
        self.streams = StreamConsumers(config, outbox)
        self.heartbeats = Heartbeats(config.heartbeat_period_s, clock)
        self.hand_overs = HandOvers()
        # Requests that the engine parked for a read that was refused; the workers report them as failed, once.
        self.unread: set[str] = set()
        self._config = config
        self._clock = clock
        self._rules = rules
        self._outbox = outbox

    def arrive(self, request_id: str, ticket: HandoffTicket, prompt_tokens: int) -> ConsumerRecord:
        """Begin the life of a request whose prompt is to be read."""
        arrival = self.table.find(request_id, NEW, "arrive")
        is_readback = ticket.kind == "readback"
        loadable_tokens = self._loadable_tokens(ticket, prompt_tokens, is_readback=is_readback)
        record = ConsumerRecord(request_id, arrival.target, ticket, loadable_tokens)
        self.hand_overs.join(record)
        # A decode engine pins a readback's blocks for a fixed time and listens to no heartbeat.
        if "start-heartbeat" in arrival.effects and not is_readback:
            self.heartbeats.start(record)
        return record

    def arrive_early(
        self, request_id: str, early: EarlyTicket, digest: str, media: tuple[int, str], prompt_tokens: int
    ) -> ConsumerRecord:
        """Begin the life of a request whose prompt is to be read while its peer computes it."""
        arrival = self.table.find(request_id, NEW, "arrive-early")
        # The peer's engine id and request id arrive with its answer.
        ticket = HandoffTicket("handoff", PeerAddress("", early.host, early.port), early.hand_over_id, ())
        offered_tokens = prompt_tokens - self._config.left_tokens(prompt_tokens)
        record = ConsumerRecord(request_id, arrival.target, ticket, offered_tokens)
        now_s = self._clock.observed_s
        stream = ConsumedStream(
            record, early, digest, media, prompt_tokens, offered_tokens, since_s=now_s, entered_s=now_s
        )
        self.streams.begin(stream)
        return record

    def step_early(self, stream: ConsumedStream, event: str, ticket: HandoffTicket | None) -> None:
        """Apply an event of a stream, with the ticket that came with it.

        Raises:
            IllegalTransition: `illegal-transition`.
        """
        record = stream.record
        row = self.table.find(record.request_id, record.state, event)
        if ticket is not None:
            record.ticket = ticket
        if event == "final":
            record.loadable_tokens = self._loadable_tokens(record.ticket, stream.prompt_tokens, is_readback=False)
        if row.target != record.state:
            stream.entered_s = stream.since_s = self._clock.observed_s
        self.settle(record, row)

    def _follow(self, record: ConsumerRecord, row: Transition, effect: str) -> None:
        """Perform an effect of a stream's row."""
        if effect == "start-heartbeat":
            self.heartbeats.start(record)
        elif effect == "join":
            self.hand_overs.join(record)
            if record.state == "reading" and record.hand_over is not None:
                record.hand_over.waiting -= 1
                record.hand_over.reading += 1
        elif effect == "order-stream":
            self.streams.order_again(record)
        elif effect == "order-final":
            self.streams.order_final(record)
        else:
            if effect == "end-stream" and row.event == "done":
                self.hand_overs.note_used(key_of(record.ticket), is_good=True)
            self.streams.follow(record.request_id, row, effect)

    def external_tokens(self, record: ConsumerRecord, computed_tokens: int) -> int | None:
        """Return the tokens to read beyond a local prefix of `computed_tokens`, or None while another request reads them."""
        if record.state != "queued":
            is_early = record.state in UNRESERVED
            return self.streams.external_tokens(record.request_id, computed_tokens) if is_early else 0
        record.computed_tokens = computed_tokens
        hand_over = record.hand_over
        tokens = record.loadable_tokens - computed_tokens
        if tokens <= 0 or (tokens < self._config.recompute_threshold_tokens and record.ticket.kind == "readback"):
            return 0
        if hand_over is None:
            return tokens
        return 0 if hand_over.is_spent else None if hand_over.reading else tokens

    def allocate(
        self,
        record: ConsumerRecord,
        block_ids: Sequence[Sequence[int]],
        new_block_ids: Sequence[Sequence[int]],
        external_tokens: int,
    ) -> None:
        """Order the read, or only the notification if there are no external tokens.

        Raises:
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`, for a wrong number of groups or more tokens than the peer holds.
        """
        if not external_tokens:
            self.give_up(record)
            return
        if external_tokens > record.loadable_tokens:
            raise InvalidEvent(
                f"request {quote(record.request_id)} expects {external_tokens} external tokens, its peer has "
                f"{record.loadable_tokens} for it",
                request_id=record.request_id,
            )
        row = self.table.find(record.request_id, record.state, "load")
        # Example: 48 tokens can be loaded, 16 are a prefix hit, 32 are expected: the read covers tokens 16 to 48.
        computed = record.computed_tokens
        start = record.loadable_tokens - external_tokens if computed is None else computed
        tokens = min(start + external_tokens, record.loadable_tokens)
        local_blocks = self._rules.wanted(block_ids, new_block_ids, start, tokens)
        order = ReadOrder(record.request_id, record.ticket, local_blocks, tokens, is_reported=True)
        record.state = row.target
        if record.hand_over is not None:
            record.hand_over.waiting -= 1
            record.hand_over.reading += 1
        if "order-read" in row.effects:
            self._outbox.read(order, fills_blocks=True)
        else:
            self.streams.order(record, order, start)

    def give_up(self, record: ConsumerRecord) -> None:
        """Read nothing for a request with a ticket, and notify the peer unless another request needs the hand-over.

        Raises:
            IllegalTransition: `illegal-transition`.
        """
        state, hand_over = record.state, record.hand_over
        is_waiting = state == "queued"
        is_shared = is_waiting and hand_over is not None and hand_over.is_wanted_by_others
        row = self.table.find(record.request_id, state, "hit-shared" if is_shared else "hit")
        if row.effects or row.target != state:
            self.settle(record, row)
        if is_waiting and hand_over is not None:
            self.hand_overs.leave(hand_over)

    def fail_parked(self, requests: Mapping[str, Request], request_id: str) -> None:
        """Order and expect the failure of a request that is parked for a refused read; a read under way is reported anyway."""
        request = requests.get(request_id)
        record = None if request is None else request.consumer
        if record is None or record.state not in {"reading", "draining"}:
            self.unread.add(request_id)
            self._outbox.orders["failures"][request_id] = request_id

    def give_up_unread(self, requests: Mapping[str, Request], reported: Sequence[str]) -> list[str]:
        """Give up the tickets whose refused read is reported now; return their requests."""
        unread = [request_id for request_id in reported if type(request_id) is str and request_id in self.unread]
        self.unread.difference_update(unread)
        for request_id in unread:
            request = requests.get(request_id)
            record = None if request is None else request.consumer
            if record is not None and (record.state == "queued" or record.state in UNRESERVED):
                self.give_up(record)
        return unread

    def finish(self, record: ConsumerRecord) -> None:
        """End the request.

        Raises:
            IllegalTransition: `illegal-transition`.
        """
        state, hand_over = record.state, record.hand_over
        is_shared = hand_over is not None and (
            hand_over.is_wanted_by_others if state == "queued" else state == "reading" and hand_over.waiting > 0
        )
        row = self.table.find(record.request_id, state, "finish-shared" if is_shared else "finish")
        self.settle(record, row)
        if hand_over is not None and state == "queued":
            self.hand_overs.leave(hand_over)
        elif hand_over is not None and state == "reading" and not is_shared:
            hand_over.is_spent = True

    def settle(self, record: ConsumerRecord, row: Transition) -> None:
        """Take a step and perform its row's effects, except a read, which `allocate` orders."""
        record.state = row.target
        for effect in row.effects:
            if effect == "stop-heartbeat":
                self.heartbeats.stop(record)
            elif effect in {"end-read", "end-passed-read"}:
                hand_over, is_passed = record.hand_over, effect == "end-passed-read"
                if hand_over is not None:
                    self.hand_overs.read_ended(hand_over, is_passed=is_passed, is_good=row.event == "done")
                    if is_passed and not (hand_over.is_spent or hand_over.reading or hand_over.waiting):
                        self._notify(record)  # no holder is left to take the read up
            elif effect == "order-notify":
                self._notify(record)
            elif effect == "cancel-read":
                self.hand_overs.note_used(key_of(record.ticket), is_good=False)
                self._stop_read(record.request_id, is_passed=False)
            elif effect == "pass-read":
                self._stop_read(record.request_id, is_passed=True)
            else:
                self._follow(record, row, effect)

    def _notify(self, record: ConsumerRecord) -> None:
        """Order a notification to the peer that no request reads the hand-over."""
        self.hand_overs.note_used(key_of(record.ticket), is_good=False)
        self._outbox.read(ReadOrder(record.request_id, record.ticket, self._rules.nothing, 0, is_reported=False))

    def void(self, record: ConsumerRecord) -> None:
        """Give up an unused ticket; order a running read to fail."""
        if record.state == "queued" or record.state in UNRESERVED:
            self.give_up(record)
        elif record.state == "reading":
            self._outbox.orders["voids"][record.request_id] = record.request_id
        elif record.state in {"streaming", "awaiting", "stopping"}:
            self.step_early(self.streams.find(record.request_id, "reset"), "reset", None)

    def _loadable_tokens(self, ticket: HandoffTicket, prompt_tokens: int, *, is_readback: bool) -> int:
        held = ticket.peer_tokens
        if is_readback:
            # A recurrent state cannot be cut, and the engine always computes the last token of a prompt itself. So the state fits
            # only a prompt longer than its own tokens. Example: a state of 12 tokens fits a prompt of 13 tokens, not one of 12.
            if held is None or (self._has_state and held >= prompt_tokens):
                return 0
            tokens = min(held, prompt_tokens - self._config.gives_up_early(prompt_tokens))
        else:
            loadable = prompt_tokens - self._config.unread_tokens(prompt_tokens)
            if self._has_state and held is not None and held > loadable:
                return 0  # the state covers more tokens than are wanted and cannot be rolled back, see above
            # A ticket that came back with another prompt must not make the engine count tokens that were never computed.
            tokens = held if held and held <= loadable else max(0, loadable)
        return tokens if not self._config.sees_parts or self._covers_windows(ticket, tokens) else 0

    def _covers_windows(self, ticket: HandoffTicket, tokens: int) -> bool:
        """Return whether the peer's window lists reach back to the local block of the first token that the next token sees.

        Example: a window of 32 tokens and blocks of 16. The peer went on to 90 tokens and lists (0, 6, 7) from token 32 on, 0
        being null: block 6 begins with token 48. A prompt of 80 needs tokens 49 to 79, so the blocks from token 48 on, and is
        read; one of 70 needs tokens 39 to 69, so the blocks from token 32 on, and is computed here. A peer with blocks of 4
        that lists tokens 52 to 83 for a prompt of 84 is not enough either: the local block of tokens 48 to 63 would keep a
        hole, and a prefix cache keeps blocks as a whole.
        """
        spans = ticket.span_tokens or [group.block_tokens * ticket.peer.dcp for group in self._config.groups]
        return all(
            not group.sees_a_part or _begins(blocks, span) <= group.first_kept(tokens)
            for group, blocks, span in zip(self._config.groups, ticket.peer_blocks, spans, strict=True)
        )

    def _stop_read(self, request_id: str, *, is_passed: bool) -> None:
        """Cancel a read whose request has ended; with `is_passed` another request reads next, so the peer is not notified."""
        orders = self._outbox.orders
        order: ReadOrder | None = orders["reads"].pop(request_id, None)
        if order is None:
            orders["cancels"][request_id] = request_id
            if is_passed:
                orders["passes"][request_id] = request_id
        elif is_passed:
            orders["failures"][request_id] = request_id  # no worker has seen the read
        else:
            # No worker has seen the read: it remains to notify the peer, and to report the request that the engine parked.
            self._outbox.read(order._replace(local_blocks=self._rules.nothing))


def _begins(blocks: BlockList, span: int) -> int:
    """Return the first token that a real block of the list holds."""
    nulls = 0
    for block in blocks.ids:
        if block != blocks.null:
            break
        nulls += 1
    return blocks.first_token + nulls * span
