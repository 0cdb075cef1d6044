"""The producer half of a request in the scheduler process: from arrival until the workers have ended its lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state._fences import FencePool
from kv_scheduler_state._machine import NEW, Table, TraceEntry, Transition, advance
from kv_scheduler_state._plan import GrantOrder
from kv_scheduler_state._records import new_tuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._blocks import BlockClipper, Blocks
    from kv_scheduler_state._config import SchedulerConfig
    from kv_scheduler_state._outbox import Outbox

__all__ = ["ProducerDesk", "ProducerHalf"]

_FIRST_WITH_GENERATION: Final = 15
"""Connector version whose tickets name a registration generation. Source: vLLM 0.33."""


@final
class ProducerHalf:
    """What is remembered of a request whose blocks a peer is to read."""

    __slots__ = ("fence", "is_readback", "is_void", "saved_blocks", "since_s", "state", "trace")

    def __init__(self, arrival: Transition, *, is_readback: bool, now_s: float) -> None:
        self.state = arrival.target
        self.since_s = now_s
        self.trace: list[TraceEntry] = [(now_s, arrival.event, arrival.target)]
        self.is_readback = is_readback
        self.is_void = False
        self.fence: tuple[int, int] | None = None
        self.saved_blocks = 0


@final
class ProducerDesk:
    """Applies events to producer halves and puts the resulting orders into the outbox.

    Every method asks the table before it changes anything, so a refused event leaves no trace.
    """

    __slots__ = (
        "_arrival",
        "_clipper",
        "_config",
        "_handoff",
        "_outbox",
        "_readback",
        "_trace_length",
        "fences",
        "on_allocate",
        "on_drop",
        "on_hand_over",
        "on_revoke",
        "on_sent",
        "table",
    )

    def __init__(self, config: SchedulerConfig, table: Table, clipper: BlockClipper, outbox: Outbox) -> None:
        self.table = table
        self.on_allocate = table.on("allocate")
        self.on_hand_over = table.on("hand-over")
        self.on_drop = table.on("drop")
        self.on_revoke = table.on("revoke")
        self.on_sent = table.on("sent")
        self._arrival = table.on("arrive").get(NEW)
        self.fences = FencePool(config.fence_slots, config.fence_seed)
        self._config = config
        self._clipper = clipper
        self._outbox = outbox
        self._trace_length = config.trace_length
        self.set_generation(config.generation)

    def set_generation(self, generation: int | None) -> None:
        """Tell consumers this generation from now on."""
        config = self._config
        # What every ticket says, and the lease that it announces.
        self._handoff = _params_template(config, config.lease_s, generation, is_readback=False), config.lease_s
        readback_s = config.readback_lease_s
        self._readback = _params_template(config, readback_s, generation, is_readback=True), readback_s

    def arrive(self, request_id: str, *, is_readback: bool, now_s: float) -> ProducerHalf:
        """Begin the life of a request that is to be handed over."""
        arrival = self._arrival or self.table.refuse(request_id, NEW, "arrive")
        return ProducerHalf(arrival, is_readback=is_readback, now_s=now_s)

    def allocate(self, request_id: str, half: ProducerHalf, row: Transition, now_s: float) -> None:
        """Announce the request to the workers, once, with a fence if a slot is free."""
        advance(half, row, now_s, self._trace_length)
        if "announce" in row.effects:
            half.fence = self.fences.take()
            self._outbox.expect(request_id, half.fence)

    def scheduled(self, request_id: str, half: ProducerHalf, row: Transition, blocks: Blocks, now_s: float) -> None:
        """Order the host-buffer save of a chunk."""
        advance(half, row, now_s, self._trace_length)
        if "save" in row.effects and self._config.uses_host_buffer and any(blocks):
            self._outbox.saves.append((request_id, blocks))
            self._outbox.has_orders = True
            half.saved_blocks += sum(map(len, blocks))

    def preempt(self, request_id: str, half: ProducerHalf, row: Transition, now_s: float) -> None:
        """Forget what was saved of blocks that are gone."""
        advance(half, row, now_s, self._trace_length)
        if "forget-saves" in row.effects:
            self._outbox.drop_saves(request_id)
            half.saved_blocks = 0
        half.is_void = False

    def void(self, request_id: str, half: ProducerHalf, now_s: float) -> None:
        """Take back the lease, or keep what is computed so far from being handed over."""
        revoke = self.on_revoke.get(half.state)
        if revoke is not None:
            self.revoke(request_id, half, revoke, now_s)
        half.is_void = half.state in {"prefilling", "prefilled"}

    def finish(
        self,
        request_id: str,
        half: ProducerHalf,
        row: Transition,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        now_s: float,
    ) -> dict[str, object] | None:
        """Grant the lease and return the ticket's params, or withdraw the request and return None."""
        advance(half, row, now_s, self._trace_length)
        effects = row.effects
        if "grant" in effects:
            template, lease_s = self._readback if half.is_readback else self._handoff
            self._outbox.grants.append(new_tuple(GrantOrder, (request_id, lease_s, half.fence)))
            self._outbox.has_orders = True
            params = template.copy()
            params["remote_block_ids"] = list(map(list, self._clipper.clip(block_ids)))
            params["remote_request_id"] = request_id
            params["remote_num_tokens"] = computed_tokens
            if half.fence is not None:
                params["kv_fence"] = list(half.fence)
            return params
        if "withdraw" in effects:
            self._withdraw(request_id, half)
        return None

    def revoke(self, request_id: str, half: ProducerHalf, row: Transition, now_s: float) -> None:
        """Order the early end of a lease."""
        advance(half, row, now_s, self._trace_length)
        if "order-revoke" in row.effects:
            self._outbox.revokes.append(request_id)
            self._outbox.has_orders = True

    def sent(self, half: ProducerHalf, row: Transition, now_s: float) -> None:
        """Take back the fence slot of a lease that every worker has ended."""
        advance(half, row, now_s, self._trace_length)
        if "return-slot" in row.effects:
            self._return_slot(half)

    def _withdraw(self, request_id: str, half: ProducerHalf) -> None:
        if not self._outbox.withdraw(request_id):
            self._outbox.releases.append(request_id)
            self._outbox.has_orders = True
        # At once, before the workers' answer: no ticket was written, so nobody trusts the old word, and orders of the
        # slot's next owner are applied after this one's.
        self._return_slot(half)

    def _return_slot(self, half: ProducerHalf) -> None:
        if half.fence is not None:
            self.fences.give_back(half.fence[0])
            half.fence = None


def _params_template(
    config: SchedulerConfig, lease_s: float, generation: int | None, *, is_readback: bool
) -> dict[str, object]:
    params: dict[str, object] = {
        "do_remote_prefill": not is_readback,
        "do_remote_decode": is_readback,
        "remote_block_ids": None,
        "remote_engine_id": config.engine_id,
        "remote_request_id": None,
        "remote_host": config.host,
        "remote_port": config.port,
        "tp_size": config.tp,
        "dcp_size": config.dcp,
        "pp_size": config.pp,
        "remote_num_tokens": 0,
        # A clock reading would mean nothing to the peer; the lease's length travels in kv_lease_s.
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "kv_lease_s": lease_s,
    }
    if generation is not None:
        params["kv_generation"] = generation
        if (config.dialect or 0) >= _FIRST_WITH_GENERATION:
            params["remote_registration_generation"] = generation
    if config.dialect is not None:
        params["kv_dialect"] = config.dialect
    return params
