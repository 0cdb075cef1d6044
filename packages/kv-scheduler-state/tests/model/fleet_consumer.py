"""A consumer of a random fleet: it admits tickets, reads, and checks every byte that it accepts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, final

from kv_scheduler_state._config import SchedulerConfig
from kv_scheduler_state._scheduler import SchedulerState

from .fleet_shared import FleetIdentity, FleetPrompt, Results, Shared
from .promises import demand

if TYPE_CHECKING:
    from kv_scheduler_state._decisions import FinishReason
    from kv_scheduler_state._plan import ReadOrder

__all__ = ["FleetConsumer"]


@final
@dataclass(slots=True)
class FleetRead:
    """A request of a consumer."""

    text: int
    tokens: int
    prompt: FleetPrompt
    status: str = "waiting"
    hit: int = 0
    order: ReadOrder | None = None
    ranks: list[str] = field(default_factory=list[str])
    is_told: bool = False
    memory: dict[int, object] = field(default_factory=dict[int, object])


@final
class FleetConsumer:
    """An engine that reads, with its ranks."""

    def __init__(self, number: int, shared: Shared) -> None:
        self.shared = shared
        self.name = f"consumer-{number}"
        config = shared.config
        self.state = SchedulerState(
            SchedulerConfig(self.name, "10.0.0.2", 5600, groups=config.groups, lease_s=config.lease_s, null_block=0)
        )
        self.reads: dict[str, FleetRead] = {}
        self.requests = 0
        self.blocks = 0
        self.results = Results(has_lag=config.has_lag)

    def round(self) -> None:
        """Let requests arrive, load, read and end, and order the step."""
        tickets = [prompt for prompt in self.shared.by_nonce.values() if prompt.ticket is not None]
        if tickets and not self.shared.is_healing and not self.shared.below(2):
            self._admit(tickets[-1 - self.shared.below(min(3, len(tickets)))])
        for request_id, read in list(self.reads.items()):
            if read.status == "waiting":
                self._load(request_id, read)
            elif read.status in {"reading", "aborting"}:
                self._read(request_id, read)
            elif read.status == "local":
                self._end(request_id, read)
        self.order_reads()
        self.results.step_ordered()

    def _admit(self, prompt: FleetPrompt) -> None:
        extra = 1 if any(group.kind == "state" for group in self.shared.config.groups) else 0
        is_other = not self.shared.below(6)
        for _ in range(1 + self.shared.below(self.shared.config.siblings)):
            self.requests += 1
            request_id, tokens = f"d{self.requests}", prompt.tokens + extra
            text = prompt.text + 1000 if is_other else prompt.text
            admission = self.state.arrive(
                request_id,
                prompt.ticket,
                prompt_tokens=tokens,
                identity=FleetIdentity(text, tokens),
                now_s=self.shared.now_s,
            )
            read = FleetRead(text, tokens, prompt)
            read.status = "waiting" if admission.role == "consumer" else "local"
            self.reads[request_id] = read

    def _load(self, request_id: str, read: FleetRead) -> None:
        if not self.shared.below(8):
            self._end(request_id, read)
            return
        unit = max(group.span_tokens for group in self.shared.config.groups)
        is_plain = all(group.kind == "full" for group in self.shared.config.groups)
        read.hit = unit if is_plain and read.tokens > unit and self.shared.below(2) else 0
        external = self.state.external_tokens(request_id, computed_tokens=read.hit)
        if external is None or (external and not self.shared.below(3)):
            return  # a sibling reads, or there is no room yet
        blocks, new = self._local_blocks(read)
        self.state.allocate(
            request_id, block_ids=blocks, new_block_ids=new, external_tokens=external, now_s=self.shared.now_s
        )
        read.status = "reading" if external else "local"
        read.ranks = ["idle"] * self.shared.config.readers

    def _local_blocks(self, read: FleetRead) -> tuple[list[list[int]], list[list[int]]]:
        blocks: list[list[int]] = []
        new: list[list[int]] = []
        for group in self.shared.config.groups:
            count = 1 if group.kind == "state" else -(-read.tokens // group.span_tokens)
            ids = [self.blocks + 1 + place for place in range(count)]
            self.blocks += count
            if group.kind == "window":
                gone = max(0, (read.tokens - group.window_tokens + 1) // group.span_tokens - 1)
                ids[:gone] = [0] * gone
            hits = 0 if group.kind == "state" else read.hit // group.span_tokens
            blocks.append(ids)
            new.append([block for block in ids[hits:] if block])
        return blocks, new

    def order_reads(self) -> None:
        """Take a step's plan and let the ranks act on it."""
        plan = self.state.take_step_plan(now_s=self.shared.now_s)
        for order in plan.reads:
            read = self.reads.get(order.request_id)
            if order.is_notify_only:
                self._tell_done(order)
            if read is not None and order.is_reported:
                read.order = order
                read.ranks = ["ok" if order.is_notify_only else "posted"] * self.shared.config.readers
        for request_id in (*plan.cancels, *plan.failures):
            read = self.reads.get(request_id)  # None: it ended before the abort reached the workers
            if read is not None:
                read.ranks = ["bad"] * self.shared.config.readers
                if read.order is not None and request_id not in plan.passes:
                    self._tell_done(read.order)
        for beat in plan.heartbeats:
            for peer_request_id, nonce in beat.readers:
                self.shared.tell("beat", peer_request_id, nonce, self.name, 0)

    def _tell_done(self, order: ReadOrder) -> None:
        """Let every rank tell the producer that it needs nothing more of a hand-over."""
        for rank in range(self.shared.config.readers):
            self.shared.tell("done", order.ticket.peer_request_id, order.ticket.nonce, self.name, rank)

    def _read(self, request_id: str, read: FleetRead) -> None:
        order = read.order
        if read.status == "reading" and not self.shared.below(10):
            self.state.finish(request_id, reason="abort", block_ids=[[1]], computed_tokens=0, now_s=self.shared.now_s)
            read.status = "aborting"
        for rank, doing in enumerate(read.ranks):
            if order is None or not (self.shared.is_healing or self.shared.below(2)):
                continue
            if doing == "posted":
                self._copy(order, read)
                read.ranks[rank] = "copied"
            elif doing == "copied":
                self._verify(order, read, rank)
        if set(read.ranks) <= {"ok", "bad"} and not read.is_told:
            read.is_told = True
            self.results.tell(partial(self._report, request_id, read, list(read.ranks)))

    def _copy(self, order: ReadOrder, read: FleetRead) -> None:
        """Copy the content of the peer's blocks as it is now, token by token, by the lists' own first tokens."""
        for group, local, peer in zip(
            self.shared.config.groups, order.local_blocks, order.ticket.peer_blocks, strict=True
        ):
            if group.kind == "state":
                read.memory.update({block: self.shared.memory.get(peer.ids[0]) for block in local.ids})
                continue
            span = group.span_tokens
            least = max(0, order.tokens - group.window_tokens + 1) if group.kind == "window" else 0
            for place, block in enumerate(local.ids):
                token = local.first_token + place * span
                if block == local.null or token >= order.tokens or token + span <= least:
                    continue
                there = (token - peer.first_token) // span
                is_there = 0 <= there < len(peer.ids) and peer.ids[there] != peer.null
                demand(is_there, f"{order.request_id}: the peer offers no block for token {token}: {peer}")
                read.memory[block] = self.shared.memory.get(peer.ids[there])

    def _verify(self, order: ReadOrder, read: FleetRead, rank: int) -> None:
        slot, generation = order.ticket.fence or (0, 0)
        is_intact = order.ticket.fence is None or all(words.get(slot) == generation for words in self.shared.words)
        read.ranks[rank] = "ok" if is_intact else "bad"
        if is_intact:
            self.shared.tell("done", order.ticket.peer_request_id, order.ticket.nonce, self.name, rank)

    def _report(self, request_id: str, read: FleetRead, ranks: list[str]) -> None:
        failed = [request_id] if "bad" in ranks else []
        self.state.report(sent=[], received=[request_id], failed=failed)
        order = read.order
        if failed and order is not None and read.status == "reading":
            self._tell_done(order)  # a failed read lets go of its hand-over
        if not failed and read.status == "reading" and order is not None:
            self._check_content(order, read)
        if read.status == "aborting":
            del self.reads[request_id]
        else:
            read.status = "local"

    def _check_content(self, order: ReadOrder, read: FleetRead) -> None:
        for group, local in zip(self.shared.config.groups, order.local_blocks, strict=True):
            for place, block in enumerate(local.ids):
                if block not in read.memory:
                    continue
                content = read.memory[block]
                token = local.first_token + place * group.span_tokens
                wanted = ("state", read.text, order.tokens) if group.kind == "state" else (read.text, token)
                demand(content == wanted, f"{order.request_id}: {content} was read for {wanted}, and accepted")

    def _end(self, request_id: str, read: FleetRead) -> None:
        if read.status == "local" and not self.shared.is_healing and self.shared.below(3):
            return
        is_abort, read.status = read.status == "waiting", "ending"
        end = partial(self._finish, request_id, "abort" if is_abort else "stop")
        if is_abort:
            end()  # comes from the client, not from a step
        else:
            self.results.tell(end)

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        self.state.finish(request_id, reason=reason, block_ids=[[1]], computed_tokens=0, now_s=self.shared.now_s)
        del self.reads[request_id]

    def check(self) -> None:
        """Demand that every internal promise is kept."""
        problems = self.state.check_invariants()
        demand(not problems, "; ".join(problems))

    def is_settled(self) -> bool:
        """Whether nothing is left of any request."""
        return not (self.state.live_count or self.state.has_work())
