"""The consumer half of a request in the scheduler process: from a valid ticket until its read has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state._arguments import covered_blocks, refuse_excess
from kv_scheduler_state._heartbeats import HeartbeatBook, HeartbeatPeer
from kv_scheduler_state._machine import NEW, Table, TraceEntry, Transition, advance
from kv_scheduler_state._plan import ReadOrder
from kv_scheduler_state._records import new_tuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._blocks import BlockClipper, Blocks
    from kv_scheduler_state._config import SchedulerConfig
    from kv_scheduler_state._outbox import Outbox
    from kv_scheduler_state._ticket import HandoffTicket

__all__ = ["ConsumerDesk", "ConsumerHalf"]


@final
class ConsumerHalf:
    """What is remembered of a request whose prompt a peer has computed."""

    __slots__ = ("least_tokens", "loadable_tokens", "peer", "since_s", "state", "ticket", "trace")

    def __init__(
        self, arrival: Transition, ticket: HandoffTicket, loadable_tokens: int, least_tokens: int, now_s: float
    ) -> None:
        self.state = arrival.target
        self.since_s = now_s
        self.trace: list[TraceEntry] = [(now_s, arrival.event, arrival.target)]
        self.ticket = ticket
        self.loadable_tokens = loadable_tokens
        self.least_tokens = least_tokens
        self.peer: HeartbeatPeer | None = None


@final
class ConsumerDesk:
    """Applies events to consumer halves and puts the resulting orders into the outbox.

    Every method asks the table before it changes anything, so a refused event leaves no trace.
    """

    __slots__ = (
        "_arrival",
        "_backoff_tokens",
        "_clipper",
        "_config",
        "_no_blocks",
        "_outbox",
        "_trace_length",
        "failure_event",
        "heartbeats",
        "on_done",
        "on_failure",
        "on_finish",
        "on_hit",
        "on_load",
        "table",
    )

    def __init__(self, config: SchedulerConfig, table: Table, clipper: BlockClipper, outbox: Outbox) -> None:
        self.table = table
        self.on_load = table.on("load")
        self.on_hit = table.on("hit")
        self.on_done = table.on("done")
        self.on_finish = table.on("finish")
        # By which event the failure policy calls a failed read.
        self.failure_event = "broken" if config.load_failure_policy == "recompute" else "broken-for-good"
        self.on_failure = table.on(self.failure_event)
        self._arrival = table.on("arrive").get(NEW)
        self.heartbeats = HeartbeatBook(config.heartbeat_period_s)
        self._config = config
        self._clipper = clipper
        self._outbox = outbox
        self._trace_length = config.trace_length
        self._backoff_tokens = config.backoff_tokens
        self._no_blocks: Blocks = tuple([() for _ in config.groups])

    def arrive(self, request_id: str, ticket: HandoffTicket, prompt_tokens: int, now_s: float) -> ConsumerHalf:
        """Begin the life of a request whose prompt is to be read."""
        arrival = self._arrival or self.table.refuse(request_id, NEW, "arrive")
        is_readback = ticket.kind == "readback"
        least_tokens = self._config.recompute_threshold_tokens if is_readback else 1
        half = ConsumerHalf(arrival, ticket, self._loadable_tokens(ticket, prompt_tokens), least_tokens, now_s)
        # A decode engine pins a readback's blocks for a fixed time and listens to no heartbeat.
        if "start-heartbeat" in arrival.effects and not is_readback:
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
        block_ids: Sequence[Sequence[int]],
        new_block_ids: Sequence[Sequence[int]],
        external_tokens: int,
        now_s: float,
    ) -> None:
        """Order the read, or with no external token the notification alone.

        Raises:
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`, for a wrong number of groups or more tokens than the peer holds.
        """
        if not external_tokens:
            self.give_up(request_id, half, now_s)
            return
        if external_tokens > half.loadable_tokens:
            refuse_excess(request_id, external_tokens, half.loadable_tokens)
        row = self.on_load.get(half.state) or self.table.refuse(request_id, half.state, "load")
        local_blocks = self._clipper.clip(new_block_ids)
        computed_blocks = covered_blocks(block_ids, new_block_ids)
        read = _read_order(request_id, half.ticket, local_blocks, external_tokens, computed_blocks)
        self.settle(request_id, half, row, now_s)
        if "order-read" in row.effects:
            self._order(request_id, read)

    def give_up(self, request_id: str, half: ConsumerHalf, now_s: float) -> None:
        """Read nothing for a request that has a ticket, and tell the peer.

        Raises:
            IllegalTransition: `illegal-transition`.
        """
        row = self.on_hit.get(half.state) or self.table.refuse(request_id, half.state, "hit")
        self.settle(request_id, half, row, now_s)

    def finish(self, request_id: str, half: ConsumerHalf, now_s: float) -> None:
        """End the request.

        Raises:
            IllegalTransition: `illegal-transition`.
        """
        row = self.on_finish.get(half.state) or self.table.refuse(request_id, half.state, "finish")
        self.settle(request_id, half, row, now_s)

    def settle(self, request_id: str, half: ConsumerHalf, row: Transition, now_s: float) -> None:
        """Take a step and do what its row demands; only `allocate` knows enough to order a read."""
        advance(half, row, now_s, self._trace_length)
        for effect in row.effects:
            if effect == "stop-heartbeat":
                if half.peer is not None:
                    self.heartbeats.stop(half.peer, half.ticket.peer_request_id)
                    half.peer = None
            elif effect == "order-notify":
                self._order(request_id, _read_order(request_id, half.ticket, self._no_blocks, 0, ()))
            elif effect == "cancel-read":
                self._cancel(request_id)

    def _loadable_tokens(self, ticket: HandoffTicket, prompt_tokens: int) -> int:
        held = ticket.peer_tokens
        if ticket.kind == "readback":
            # A recurrent state cannot be cut: it fits only a prompt that contains all it has seen.
            if held is None or (self._config.has_state and held > prompt_tokens):
                return 0
            return min(held, prompt_tokens)
        loadable = prompt_tokens - self._backoff_tokens
        if self._config.has_state and held is not None and held > loadable:
            return 0  # a state of more tokens than are wanted: it cannot be set back, see above
        # A ticket that came back with another prompt must not make the engine believe in tokens nobody computed.
        return max(0, min(loadable, held) if held else loadable)

    def _order(self, request_id: str, read: ReadOrder) -> None:
        self._outbox.reads[request_id] = read
        self._outbox.has_orders = True

    def _cancel(self, request_id: str) -> None:
        order = self._outbox.reads.get(request_id)
        if order is None:
            self._outbox.cancels.append(request_id)
            self._outbox.has_orders = True
        else:
            # No worker has seen the read: what is left of it is to tell the peer, and to report to the parked engine.
            self._outbox.reads[request_id] = order._replace(local_block_ids=self._no_blocks)


def _read_order(
    request_id: str,
    ticket: HandoffTicket,
    local_blocks: Blocks,
    external_tokens: int,
    computed_blocks: tuple[int, ...],
) -> ReadOrder:
    _, peer, peer_request_id, peer_block_ids, _, lease_s, fence, _, _, _ = ticket
    return new_tuple(
        ReadOrder,
        (
            request_id,
            peer,
            peer_request_id,
            peer_block_ids,
            local_blocks,
            fence,
            lease_s,
            external_tokens > 0,
            external_tokens,
            computed_blocks,
        ),
    )
