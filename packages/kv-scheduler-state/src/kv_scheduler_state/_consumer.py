"""The consumer half of a request in the scheduler process: from a valid ticket until its read has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state._heartbeats import HeartbeatBook, HeartbeatPeer
from kv_scheduler_state._machine import NEW, Table, TraceEntry, Transition, advance
from kv_scheduler_state._plan import ReadOrder

if TYPE_CHECKING:
    from kv_scheduler_state._blocks import Blocks
    from kv_scheduler_state._config import SchedulerConfig
    from kv_scheduler_state._outbox import Outbox
    from kv_scheduler_state._ticket import HandoffTicket

__all__ = ["ConsumerDesk", "ConsumerHalf"]


@final
class ConsumerHalf:
    """What is remembered of a request whose prompt a peer has computed."""

    __slots__ = ("least_tokens", "loadable_tokens", "peer", "since_s", "state", "ticket", "trace")

    def __init__(self, ticket: HandoffTicket, loadable_tokens: int, least_tokens: int, now_s: float) -> None:
        self.state = NEW
        self.since_s = now_s
        self.trace: list[TraceEntry] = []
        self.ticket = ticket
        self.loadable_tokens = loadable_tokens
        self.least_tokens = least_tokens
        self.peer: HeartbeatPeer | None = None


@final
class ConsumerDesk:
    """Applies events to consumer halves and puts the resulting orders into the outbox.

    Every method asks the table before it changes anything, so a refused event leaves no trace.
    """

    __slots__ = ("_backoff_tokens", "_config", "_no_blocks", "_outbox", "_trace_length", "heartbeats", "table")

    def __init__(self, config: SchedulerConfig, table: Table, outbox: Outbox) -> None:
        self.table = table
        self.heartbeats = HeartbeatBook(config.heartbeat_period_s)
        self._config = config
        self._outbox = outbox
        self._trace_length = config.trace_length
        self._backoff_tokens = config.backoff_tokens
        self._no_blocks: Blocks = tuple([() for _ in config.groups])

    def arrive(self, request_id: str, ticket: HandoffTicket, prompt_tokens: int, now_s: float) -> ConsumerHalf:
        """Begin the life of a request whose prompt is to be read."""
        is_readback = ticket.kind == "readback"
        half = ConsumerHalf(
            ticket,
            self._loadable_tokens(ticket, prompt_tokens),
            self._config.recompute_threshold_tokens if is_readback else 1,
            now_s,
        )
        row = self.table.find(request_id, NEW, "arrive")
        advance(half, row, now_s, self._trace_length)
        # A decode engine pins a readback's blocks for a fixed time and listens to no heartbeat.
        if "start-heartbeat" in row.effects and not is_readback:
            half.peer = self.heartbeats.start(ticket, now_s)
        return half

    def external_tokens(self, half: ConsumerHalf, computed_tokens: int) -> int:
        """Return the tokens to read beyond a local prefix of `computed_tokens`; changes nothing."""
        if half.state != "queued":
            return 0
        tokens = half.loadable_tokens - computed_tokens
        return tokens if tokens > 0 and tokens >= half.least_tokens else 0

    def allocate(
        self,
        request_id: str,
        half: ConsumerHalf,
        row: Transition,
        local_blocks: Blocks,
        computed_blocks: tuple[int, ...],
        external_tokens: int,
        now_s: float,
    ) -> None:
        """Order the read, or with no external token the notification alone."""
        advance(half, row, now_s, self._trace_length)
        if "order-read" in row.effects:
            self._order(request_id, half, local_blocks, computed_blocks, external_tokens)
        if row.effects:
            self._finish_effects(request_id, half, row)

    def settle(self, request_id: str, half: ConsumerHalf, row: Transition, now_s: float) -> None:
        """Apply an event that carries nothing else: the read's end, a preemption or the request's end."""
        advance(half, row, now_s, self._trace_length)
        if row.effects:
            self._finish_effects(request_id, half, row)

    def failure_event(self) -> str:
        """Return the event by which the failure policy calls a failed read."""
        return "broken" if self._config.load_failure_policy == "recompute" else "broken-for-good"

    def _finish_effects(self, request_id: str, half: ConsumerHalf, row: Transition) -> None:
        effects = row.effects
        if "order-notify" in effects:
            self._order(request_id, half, self._no_blocks, (), 0)
        if "cancel-read" in effects:
            self._cancel(request_id)
        if "stop-heartbeat" in effects and half.peer is not None:
            self.heartbeats.stop(half.peer, half.ticket.peer_request_id)
            half.peer = None

    def _loadable_tokens(self, ticket: HandoffTicket, prompt_tokens: int) -> int:
        held = ticket.peer_tokens
        if ticket.kind == "readback":
            # A recurrent state cannot be cut: it fits only a prompt that contains all it has seen.
            if held is None or (self._config.has_state and held > prompt_tokens):
                return 0
            return min(held, prompt_tokens)
        loadable = max(0, prompt_tokens - self._backoff_tokens)
        # A ticket that came back with another prompt must not make the engine believe in tokens nobody computed.
        return min(loadable, held) if held else loadable

    def _order(
        self,
        request_id: str,
        half: ConsumerHalf,
        local_blocks: Blocks,
        computed_blocks: tuple[int, ...],
        external_tokens: int,
    ) -> None:
        ticket = half.ticket
        self._outbox.reads[request_id] = ReadOrder(
            request_id,
            ticket.peer,
            ticket.peer_request_id,
            ticket.peer_block_ids,
            local_blocks,
            ticket.fence,
            ticket.lease_s,
            external_tokens > 0,
            external_tokens,
            computed_blocks,
        )
        self._outbox.has_orders = True

    def _cancel(self, request_id: str) -> None:
        order = self._outbox.reads.get(request_id)
        if order is None:
            self._outbox.cancels.append(request_id)
            self._outbox.has_orders = True
        else:
            # No worker has seen the read: what is left of it is to tell the peer, and to report to the parked engine.
            self._outbox.reads[request_id] = order._replace(local_block_ids=self._no_blocks)
