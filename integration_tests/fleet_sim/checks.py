"""Checks that know nothing of production's reasons: whose bytes are in a page, who may still write, what is left at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
from fairness import Fairness

from kv_nixl_agent.memory.fences import FENCE_PADS
from kv_nixl_agent.streams.polls import PAD_COUNT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine import Engine
    from fleet import Fleet
    from host import Request

    from vllm_adapter.worker.engine_thread import WorkerSide

_MOST_PEERS = 24
_MANY_SLOTS = 64


@final
class EngineChecks:
    """Checks of one engine's pages and blocks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._world = engine.fleet.world
        self._in_the_way: tuple[str, int] | None = None
        self._unfenced: set[str] = set()
        self.fairness = Fairness(engine)

    def accepted(self, request: Request) -> None:
        """A read that the engine accepts has brought this prompt's tokens and no others."""
        self._world.accepted.add(request.request_id)
        if request.request_id in self._unfenced:
            self._engine.violated("unfenced-read", f"{request.request_id} is read without a fence")
        self._contents(request, request.valid, "accepted")
        for number, block in self._engine.host.holdings.filled(request, request.hit, request.valid):
            if self._engine.pages.is_left(number, block):
                self._engine.violated(
                    "left-accepted",
                    f"{request.request_id} is read, but part of block {block} of group {number} is left as "
                    "its last owner left it",
                )
        if request.is_streamed:
            self._world.counts["stream-bytes early"] += request.early_bytes
            self._world.counts["stream-bytes late"] += request.late_bytes
        for name, is_so in self._features(request).items():
            self._world.counts[f"accepted-{name}"] += is_so

    def _features(self, request: Request) -> dict[str, bool]:
        """Return what an accepted read has shown to work."""
        plan, fleet = self._engine.plan, self._engine.fleet.plan.fleet
        kinds = {group.kind for group in fleet.groups}
        shapes = {
            "latent": "latent" in kinds,
            "state": "state" in kinds,
            "window": any(group.window_tokens for group in fleet.groups),
            "mirror": any(one.has_mirror for one in fleet.engines),
            "unequal-tp": any(one.tp != plan.tp for one in fleet.engines),
        }
        streamed = {f"streamed {name}": request.is_streamed and is_so for name, is_so in shapes.items()}
        return {
            **shapes,
            "mirror": plan.has_mirror,
            "after-hit": request.hit > 0,
            "streamed": request.is_streamed,
            **streamed,
        }

    def _ordered(self, request: Request, order: Any) -> None:
        """A read fills no block that others may use."""
        for blocks in order.local_blocks:
            for block in blocks.ids:
                if block and self._engine.host.pool.is_shared(block):
                    self._engine.violated(
                        "read-into-shared", f"{request.request_id} is to read into block {block}, which others may use"
                    )

    def _slot_opened(self, request: Request, slot: int) -> None:
        """A stream's slot has no other owner that still holds blocks: its void would hit the new owner's word."""
        for other in self._engine.host.requests.values():
            if other is not request and other.fence is not None and other.fence[0] == slot and any(other.blocks):
                self._engine.violated(
                    "slot-shared",
                    f"stream slot {slot} is given to {request.request_id}, and {other.request_id} "
                    f"({other.status}) has it still",
                )

    def begins(self, request: Request, hit: int) -> None:
        """Where nothing breaks, no prompt that a peer computes at the same time is computed here as well."""
        plan = self._engine.fleet.plan.fleet
        if not plan.is_calm or not request.hand_over_id or request.is_producer or request.is_loaded or hit:
            return
        if plan.fence_slots < _MANY_SLOTS:
            return  # a prompt without a fence is not handed over
        sizes = {one.block_tokens for one in plan.engines}
        if len(sizes) > 1 and any(group.window_tokens for group in plan.groups):
            return  # a list of the last blocks may begin within a block of the reader's
        if request.status == "running" and plan.stream_fraction == 1 and all(one.streams for one in plan.engines):
            self._engine.violated("needless-compute", f"{request.request_id} is computed, and was to be read")

    def kept(self, number: int, block: int, ids: tuple[int, ...]) -> None:
        """A block that is known by content has this content."""
        size = self._engine.plan.block_tokens
        wrong = self._engine.pages.groups[number].wrong(block, 0, np.array(ids[-size:], np.uint32))
        if wrong is not None:
            self._engine.violated(
                "poisoned-cache",
                f"block {block} of group {number} is known as tokens {ids[-size]} to {ids[-1]}, but holds "
                f"{self._engine.fleet.whose(wrong)}",
            )

    def finished(self, request: Request) -> None:
        """The pages of a request still hold its own tokens when it ends."""
        self._contents(request, min(request.computed, len(request.ids)), "finished")

    def orders_made(self, orders: Any) -> None:
        """Take in the fences, reads and streams of a step's orders."""
        requests, plan = self._engine.host.requests, orders.plan
        for order in plan.fences:
            if (request := requests.get(order.request_id)) is not None:
                request.fence = (order.slot, order.generation)
        for order in plan.reads:
            self._unfenced.discard(order.request_id)
            if order.ticket.fence is None:
                self._unfenced.add(order.request_id)
            if (request := requests.get(order.request_id)) is not None:
                request.is_streamed = False
                self._ordered(request, order)
        self.fairness.ordered(orders)
        for opening in plan.streams.opens:
            if (request := requests.get(opening.request_id)) is not None:
                self._slot_opened(request, opening.slot)
                request.fence = (opening.slot, opening.generation)
        for stream in plan.streams.watches:
            if (request := requests.get(stream.read.request_id)) is not None:
                request.is_streamed = True
                self._ordered(request, stream.read)

    def failed(self, request: Request) -> None:
        """Where nothing breaks, no read fails."""
        if self._engine.fleet.plan.fleet.is_calm:
            self._world.violated("needless-failure", f"{request.request_id}: its read failed, and nothing was wrong")

    def handed_over(self, ticket: Mapping[str, object] | None) -> None:
        """Every ticket has a fence, and no more leases are out than are allowed."""
        plan = self._engine.fleet.plan.fleet
        if ticket is None or ticket.get("kv_fence") is None:
            self._engine.violated("unfenced-ticket", f"a ticket without a fence: {ticket}")
        leases = self._engine.side._state.lease_count
        if plan.max_leases and leases > plan.max_leases:
            self._engine.violated("quota", f"{leases} leases are out, {plan.max_leases} are allowed")

    def _contents(self, request: Request, tokens: int, event: str) -> None:
        size = self._engine.plan.block_tokens
        for number, group in enumerate(self._engine.fleet.plan.fleet.groups):
            if group.kind == "state":
                self._state(request, number, tokens, event)
                continue
            first = max(0, tokens - group.window_tokens + 1) if group.window_tokens else 0
            for place in range(first // size, -(-tokens // size)):
                start, stop = max(first, place * size), min(tokens, (place + 1) * size)
                block = request.blocks[number][place]
                if not block:
                    self._world.violated(
                        f"hole-{event}", f"{request.request_id}: token {start} of group {number} has no block"
                    )
                    return
                ids = np.array(request.ids[start:stop], np.uint32)
                wrong = self._engine.pages.groups[number].wrong(block, start - place * size, ids)
                if wrong is not None:
                    self._engine.violated(
                        f"contents-{event}",
                        f"{request.request_id} {event} with {tokens} tokens, but block {block} (place "
                        f"{place}, group {number}) holds {self._engine.fleet.whose(wrong)}",
                    )
                    return

    def round_ended(self, request: Request) -> None:
        """A prompt that is still computed elsewhere does not keep those behind it for two steps in a row."""
        steps = self._engine.host.steps
        known = self._engine.side._state._requests.get(request.request_id)
        if known is None or known.consumer is None or known.consumer.state != "offered":
            return
        if self._in_the_way == (request.request_id, steps - 1):
            self._engine.violated(
                "in-the-way",
                f"{request.request_id} has no blocks in two steps in a row, and no request behind it was served",
            )
        self._in_the_way = request.request_id, steps

    def _state(self, request: Request, number: int, tokens: int, event: str) -> None:
        """The state is that after exactly these tokens."""
        block = request.blocks[number][0]
        if self._engine.pages.groups[number].differs(block, request.ids[:tokens]):
            self._engine.violated(
                f"state-{event}",
                f"{request.request_id} {event} with {tokens} tokens, but block {block} of group {number} "
                "holds another state than theirs",
            )

    def freed(self, request: Request, blocks: set[int]) -> None:
        """Nothing on the wire may still write into blocks that are freed."""
        if not blocks:
            return
        for transfer in self._engine.fleet.fabric.transfers:
            if transfer.owner.process is not self._engine.process or not transfer.is_on_the_wire:
                continue
            for _, target, _ in transfer.copies[transfer.moved :]:
                block = self._engine.pages.block_of(target)
                if block in blocks:
                    self._engine.violated(
                        "freed-under-read",
                        f"block {block} of {request.request_id} is freed while a read from "
                        f"{transfer.peer_name.split('/')[0]} may still write into it",
                    )
                    return

    def lease_ended(self, request: Request) -> None:
        """When blocks are free, no rank's fence word says any more that they are not."""
        if request.fence is None:
            return
        slot, generation = request.fence
        for worker in self._engine.workers:
            registration: Any = worker._registration
            if registration is None:
                continue  # asleep: there are no words any more
            word = registration.agent._agent._fences.read(slot)
            if word == generation:
                self._engine.violated(
                    "fence-stands",
                    f"the blocks of {request.request_id} are free, and fence word {slot} of rank "
                    f"{worker.rank[1]} still says {generation}",
                )


def leftovers(fleet: Fleet) -> list[tuple[str, str]]:
    """Return what is left although every request has had its time: (kind, sentence)."""
    found: list[tuple[str, str]] = [("request-never-ended", f"{name}: no answer") for name in fleet.router.open_names()]
    for engine in fleet.living():
        found += [(kind, f"{engine.name}: {text}") for kind, text in _left_in(engine)]
    return found


def _left_in(engine: Engine) -> list[tuple[str, str]]:
    host, state, free = engine.host, engine.side._state, len(engine.host.pool.free)
    if host.outages.is_paused:
        return [("asleep", "it does not wake up")]
    for block, (group, ids) in host.pool.kept.items():
        if block not in host.holdings.prefix.pending:
            engine.checks.kept(group, block, ids)
    rests = ", ".join(f"{one.request_id} {one.status}" for one in host.requests.values())
    records = state.live_count, state.lease_count, state.fence_slots_used
    found = [
        (bool(rests), "request-left", f"requests are left: {rests}"),
        (free != engine.plan.blocks - 1, "blocks-lost", f"{free} of {engine.plan.blocks - 1} blocks are free"),
        (any(records), "records-left", f"the request machines keep {records} requests, leases, fence slots"),
    ]
    if state.streams is not None:
        kept = state.streams.produced.slots_used, state.streams.consumed.blocks_held
        found.append((any(kept), "streams-left", f"the request machines keep {kept} stream slots, blocks of streams"))
    left = [(kind, text) for is_left, kind, text in found if is_left]
    for worker in engine.workers:
        rank = f"rank {worker.rank[1]}"
        left += [(kind, f"{rank} has {text}") for is_left, kind, text in _in_rank(worker) if is_left]
    return left


def _in_rank(worker: WorkerSide) -> list[tuple[bool, str, str]]:
    """Return (whether anything is left, kind, what) of the tables of a rank at rest."""
    registration: Any = worker._registration
    agent = registration.agent._agent
    reads, leases, peers = (
        registration.reads.snapshot(),
        registration.leases._leases.live_count(),
        registration.reads._peers,
    )
    waiting = sum(len(peer.waiting) for peer in peers.engines.values())
    gauges, handles = agent.statistics(), len(agent._port.handles) - agent._checks.kept_count
    count, in_flight, fence_pads = gauges["queued"], gauges["inflight_bytes"], gauges["fence_pads_free"]
    watched, pads = gauges["streams_watched"], gauges["stream_pads_free"]
    return [
        (bool(worker._due_reads), "due-reads-left", f"{len(worker._due_reads)} reads that have not been reported"),
        (bool(reads["transfers"]), "transfers-left", f"{reads['transfers']} transfers"),
        (bool(leases), "leases-left", f"{leases} leases"),
        (bool(agent.quarantine()), "quarantine-left", f"{len(agent.quarantine())} transfers in quarantine"),
        (bool(count or in_flight), "queue-left", f"{count:.0f} waiting transfers and {in_flight:.0f} bytes in flight"),
        (fence_pads != FENCE_PADS, "fence-pads-left", f"{fence_pads:.0f} of {FENCE_PADS} pads for fence words"),
        (bool(watched), "watches-left", f"{watched:.0f} streams that it watches"),
        (pads not in {0, PAD_COUNT}, "pads-left", f"{pads:.0f} of {PAD_COUNT} pads"),
        (bool(agent._port.unloaded_alive), "unloaded-alive", f"unloaded {agent._port.unloaded_alive}: sockets leak"),
        (bool(handles), "handles-left", f"{handles} NIXL handles beside those kept for fence words"),
        (len(peers.engines) > _MOST_PEERS, "peers-left", f"{len(peers.engines)} engines"),
        (bool(waiting), "reads-waiting", f"{waiting} reads that wait for an engine"),
    ]
