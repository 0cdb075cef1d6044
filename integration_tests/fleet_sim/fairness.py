"""Fairness between peers: an engine in trouble delays only those who read from it.

Theory of operation. A pair of engines is *untouched* in an episode if no fault names either process, and none the links between
them; other engines may be dead, slow or cut off. The time of a read of an untouched pair, from its order to its report, is made
up of messages and bytes between the two, which the network accounts for, and of waiting. The waiting is bounded, whatever other
engines do. In a calm fleet the reads of one peer end in the order of their orders; only shorter ones may overtake.

Example: a read takes 0.61 s, of which the network drew 0.48 s for handshake, pages and fence between P0 and D2. It has waited for
0.13 s: a report leaves with the end of a step of at most 0.1 s, and a thread looks at the wire every 0.08 s at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from network import LINK_KINDS

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine import Engine
    from plan import EpisodePlan

_HARMLESS_KINDS = frozenset(("pressure", "forged"))
"""Faults of an engine that stop neither its process nor its clock."""
WAIT_S = 0.5
"""Longest waiting of a read of an untouched pair; 0.12 s is the most that 1000 seeds have shown."""
_REFUSED_S = 0.5
"""Longest time until a read from a dead engine has failed, beside the time in which NIXL notices the death."""
_HEAD_START_S = 0.3
"""In a calm fleet a read that is ordered so much earlier than another of the same peer, and is no longer, ends first."""


def is_untouched(plan: EpisodePlan, one: int, other: int, processes: Collection[int]) -> bool:
    """Tell whether no fault names one of these processes, or the links between two slots."""
    return not any(
        {fault.engine, fault.second} == {one, other}
        if fault.kind in LINK_KINDS
        else fault.engine in processes and fault.kind not in _HARMLESS_KINDS
        for fault in plan.faults
    )


@final
@dataclass(frozen=True, slots=True)
class _Read:
    """A read that is under way: since when, from which slot, how long, and what its link had cost by then.

    `blocks` counts those of each group, which say how much is read: of two groups of blocks of 8 tokens, the second a window of
    8 tokens, 24 tokens are (3, 1), and (1, 1) after a prefix hit of 16. `tokens` counts beside them, since of a last block
    only the tokens that the prompt has may be read: 10 tokens take less time than 16, in 2 blocks of 8 both.
    """

    begun_s: float
    slot: int
    tokens: int
    blocks: tuple[int, ...]
    spent_s: float
    dead_peer: Engine | None


@final
class Fairness:
    """Times of one engine's reads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._fleet = engine.fleet
        self._world = engine.fleet.world
        self._begun: dict[str, _Read] = {}
        # Slot, and what its link had cost, of streams: they wait for their peer's chunks, but their bytes delay others.
        self._streams: dict[str, tuple[int, float]] = {}
        self._changed = {request.name for request in engine.fleet.plan.requests if request.damage}

    def ordered(self, orders: Any) -> None:
        """Note the reads that a step orders, but for those of changed tickets, which may name an engine that never was."""
        for stream in orders.plan.streams.watches:
            lane = self._fleet.slot_at(stream.read.ticket.peer.host, stream.read.ticket.peer.port)
            if lane:
                self._streams[stream.read.request_id] = int(lane[1:]), self._spent_s(lane)
        for order in orders.plan.reads:
            self._streams.pop(order.request_id, None)
            lane = self._fleet.slot_at(order.ticket.peer.host, order.ticket.peer.port)
            is_changed = order.request_id.split("-")[0].rstrip("x") in self._changed
            if lane and order.is_reported and not order.is_notify_only and not is_changed:
                slot = int(lane[1:])
                # Reads of the same peer that are under way may come first: their bytes are its own, too.
                before = [read.spent_s for read in self._begun.values() if read.slot == slot]
                before += [spent_s for at, spent_s in self._streams.values() if at == slot]
                spent_s = min([self._spent_s(lane), *before])
                peer = self._fleet.engine(slot)
                blocks = tuple(len(group.ids) - group.ids.count(group.null) for group in order.local_blocks)
                dead = peer if peer is not None and peer.process.is_dead else None
                self._begun[order.request_id] = _Read(self._world.time_s, slot, order.tokens, blocks, spent_s, dead)

    def _spent_s(self, lane: str) -> float:
        spent = self._fleet.network.spent_s
        return spent.get((lane, self._engine.lane), 0.0) + spent.get((self._engine.lane, lane), 0.0)

    def reported(self, request_id: str, together: Collection[str], *, is_good: bool) -> None:
        """Check the time of a read that the workers report, and that it has overtaken none but those `together` with it.

        A failed one may be early.
        """
        self._streams.pop(request_id, None)
        read = self._begun.pop(request_id, None)
        if read is None:
            return
        pair = self._engine.slot, read.slot
        if is_untouched(self._fleet.plan, *pair, pair):
            self._check_time(request_id, read)
        self._check_refusal(request_id, read)
        if is_good and self._fleet.plan.fleet.is_calm:
            self._check_order(request_id, read, together)

    def _check_time(self, request_id: str, read: _Read) -> None:
        lane = self._fleet.lane(read.slot)
        elapsed_s, own_s = self._world.time_s - read.begun_s, self._spent_s(lane) - read.spent_s
        if elapsed_s - own_s > WAIT_S:
            self._engine.violated(
                "delayed-by-others",
                f"the read of {request_id} from {lane} took {elapsed_s:.2f} s, {own_s:.2f} s of it for "
                "their messages and bytes; neither of the two was in trouble",
            )

    def _check_refusal(self, request_id: str, read: _Read) -> None:
        """A read from an engine that was dead all the time ends soon: a refused connection is an answer."""
        peer, plan = self._fleet.engine(read.slot), self._fleet.plan
        if peer is None or peer is not read.dead_peer or self._world.is_healed:
            return
        if not is_untouched(plan, self._engine.slot, read.slot, (self._engine.slot,)):
            return
        elapsed_s = self._world.time_s - read.begun_s
        if elapsed_s > plan.fleet.notice_s + _REFUSED_S:
            self._engine.violated(
                "refused-late",
                f"the read of {request_id} from {peer.lane}, which was dead all the time, took "
                f"{elapsed_s:.2f} s to fail",
            )

    def _check_order(self, request_id: str, read: _Read, together: Collection[str]) -> None:
        for name, other in self._begun.items():
            if name in together:
                continue
            is_earlier = other.begun_s < read.begun_s - _HEAD_START_S
            is_no_longer = other.tokens <= read.tokens and all(
                theirs <= ours for theirs, ours in zip(other.blocks, read.blocks, strict=True)
            )
            if other.slot == read.slot and is_earlier and is_no_longer:
                self._engine.violated(
                    "overtaken",
                    f"{request_id} (blocks {read.blocks}) ends before {name} ({other.blocks}), which "
                    f"was ordered {read.begun_s - other.begun_s:.2f} s earlier from the same engine",
                )
