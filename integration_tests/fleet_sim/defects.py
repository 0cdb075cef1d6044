"""Functions that planted bugs put in the place of production's: each takes the original and returns the wrong one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from kv_handshake import Client
from kv_handshake._task import Task
from kv_nixl_agent import TransferThread
from kv_nixl_agent._fences import FenceArray
from kv_nixl_agent._handles import Handles
from kv_nixl_agent._mailbox import Mailbox
from kv_nixl_agent._peers import PeerTable
from kv_nixl_agent._schedule import Schedule
from kv_nixl_agent._word_check import WordCheck
from kv_scheduler_state._blocks import BlockRules
from kv_scheduler_state._fences import ENDED_BIT, FencePool
from kv_scheduler_state._heartbeats import Heartbeats
from kv_scheduler_state._outbox import Outbox
from kv_scheduler_state._producer import Producers
from kv_scheduler_state._seal import TicketSeal
from kv_topology import TransferPlan
from vllm_adapter.scheduler.side import SchedulerSide
from vllm_adapter.steps import StepReport
from vllm_adapter.worker.engine_thread import WorkerSide
from vllm_adapter.worker.transfer.leases import LeaseKeeper
from vllm_adapter.worker.transfer.peers import PeerDirectory
from vllm_adapter.worker.transfer.reads import ReadCoordinator

__all__ = [
    "always_alone",
    "always_quiet",
    "cancelled_counts",
    "early_count",
    "early_free",
    "end_twice",
    "ended_bit_ignored",
    "first_tokens_zero",
    "first_transfer_ends",
    "good_report",
    "hold_nothing",
    "last_first",
    "late_fence",
    "loses_every",
    "loses_reads",
    "mixed_up",
    "no_ended_words",
    "no_first_words",
    "one_reader_beats",
    "only_good",
    "same_scratch",
    "seed_beyond_doubles",
    "sent_twice",
    "shared_cap",
    "shifted_rows",
    "short_read",
    "slot_returned_early",
    "stale_generation",
    "swapped_ranks",
    "unfenced",
    "unloads_all",
    "unverified",
    "waits_for_refused",
    "whole_lists",
]


def sent_twice(old: Any) -> Any:
    """A lease's end is reported again with the next one's."""
    former: list[str] = []

    def report(self: LeaseKeeper, end: Any, heard_s: Any) -> None:
        for request_id in former:
            self._sent(request_id)
        former[:] = [end.request_id]
        old(self, end, heard_s)

    return report


def loses_every(count: int) -> Callable[[Any], Any]:
    def make(old: Any) -> Any:
        numbers = itertools.count(1)

        def put(self: Mailbox, item: Any) -> None:
            if next(numbers) % count:
                old(self, item)

        return put

    return make


def ended_bit_ignored(old: Any) -> Any:
    def judge(self: WordCheck) -> tuple[int, str]:
        found, objection = old(self)
        fence = self._order.fence
        return found, "" if fence is not None and found & ~ENDED_BIT == fence[1] else objection

    return judge


def good_report(old: Any) -> Any:
    def take_report(self: WorkerSide) -> StepReport:
        report: StepReport = old(self)
        return StepReport(report.sent, report.received, frozenset(), report.registration)

    return take_report


def mixed_up(old: Any) -> Any:
    def allocated(self: SchedulerSide, request_id: str, blocks: Any, new: Any, **named: Any) -> None:
        if named["external_tokens"]:
            blocks, new = ([list(reversed(ids)) for ids in lists] for lists in (blocks, new))
        old(self, request_id, blocks, new, **named)

    return allocated


def first_tokens_zero(old: Any) -> Any:
    def offered(self: BlockRules, block_ids: Any, tokens: int) -> Any:
        lists, first_tokens = old(self, block_ids, tokens)
        return lists, [0] * len(first_tokens)

    return offered


def short_read(old: Any) -> Any:
    def read(self: Outbox, request_id: str, order: Any, **named: Any) -> None:
        old(self, request_id, order._replace(tokens=max(0, order.tokens - 1)), **named)

    return read


def shifted_rows(old: Any) -> Any:
    def indices(self: TransferPlan, rank: Any, *arguments: Any, **named: Any) -> Any:
        mine, theirs = old(self, rank, *arguments, **named)
        return mine, theirs[::-1].copy()

    return indices


def swapped_ranks(old: Any) -> Any:
    def wire_up(self: PeerDirectory, engine: Any, metadata: Any) -> None:
        ranks = list(metadata)
        old(self, engine, dict(zip(ranks, [metadata[rank] for rank in reversed(ranks)], strict=True)))

    return wire_up


def same_scratch(old: Any) -> Any:
    def take(self: FenceArray, expected: int, **named: Any) -> int | None:
        word: int | None = old(self, expected, **named)
        if word is not None:
            self._free.appendleft(word)
        return word

    return take


def early_count(old: Any) -> Any:
    """The first of several readers ends the lease."""
    return lambda self, *a, **n: old(self, *a, **{**n, "reader_count": 1})


def slot_returned_early(old: Any) -> Any:
    def finish(self: Producers, request_id: str, record: Any, row: Any, blocks: Any, params: Any, now_s: float) -> None:
        old(self, request_id, record, row, blocks, params, now_s)
        if params is not None and record.fence is not None:
            self.fences.give_back(record.fence[0])
            record.fence = None

    return finish


def only_good(old: Any) -> Any:
    """The end of a failed handshake is lost."""

    def ended(self: Client, *arguments: Any) -> None:
        *others, on_done = arguments
        old(self, *others, lambda outcome: on_done(outcome) if outcome.is_ok else None)

    return ended


def first_transfer_ends(old: Any) -> Any:
    def close(self: ReadCoordinator, read: Any, transfer_id: str) -> None:
        read.transfers.clear()
        old(self, read, transfer_id)

    return close


def late_fence(old: Any) -> Any:
    """The word of an ended lease is overwritten only when the next word is written."""
    waiting: list[Callable[[], None]] = []

    def write(self: TransferThread, slot: int, generation: int) -> None:
        while waiting:
            waiting.pop()()
        if generation & ENDED_BIT:
            waiting.append(lambda: old(self, slot, generation))
        else:
            old(self, slot, generation)

    return write


def no_ended_words(old: Any) -> Any:
    def write(self: TransferThread, slot: int, generation: int) -> None:
        if not generation & ENDED_BIT:
            old(self, slot, generation)

    return write


def no_first_words(old: Any) -> Any:
    def write(self: TransferThread, slot: int, generation: int) -> None:
        if generation & ENDED_BIT:
            old(self, slot, generation)

    return write


def unverified(old: Any) -> Any:  # noqa: ARG001
    def opened(self: TicketSeal, reader: Any, fields: Any, kind: Any) -> Any:  # noqa: ARG001
        return reader.ticket_of(fields, kind)

    return opened


def always_quiet(old: Any) -> Any:
    return lambda self, *a, **n: old(self, *a, **{**n, "is_memory_quiet": True})


def hold_nothing(old: Any) -> Any:
    def hold(self: Handles, transfer: Any, now_s: float) -> None:
        old(self, transfer, now_s)
        self._give_up(transfer)

    return hold


def loses_reads(old: Any) -> Any:
    """The reads of a step are lost."""
    return lambda self, plan, void_grants, reads: old(self, plan, void_grants, reads._replace(reads=()))


def early_free(old: Any) -> Any:
    """Blocks are reported free when the lease is granted."""

    def apply(self: LeaseKeeper, plan: Any, void: Any = ()) -> None:
        old(self, plan, void)
        for order in plan.grants:
            self._sent(order.request_id)

    return apply


def one_reader_beats(old: Any) -> Any:
    def take_due(self: Heartbeats, now_s: float) -> Any:
        return [order._replace(readers=order.readers[:1]) for order in old(self, now_s)]

    return take_due


def end_twice(old: Any) -> Any:
    def end(self: ReadCoordinator, read: Any) -> None:
        old(self, read)
        read.is_ended = False
        old(self, read)

    return end


def unfenced(old: Any) -> Any:
    def refusal(self: Producers, record: Any, *arguments: Any) -> str:
        code: str = old(self, record, *arguments)
        return "" if code == "no-fence-slot" else code

    return refusal


def whole_lists(old: Any) -> Any:
    """Windows are cut by count from the end of what is allocated, spare blocks among them."""

    def offered(self: BlockRules, block_ids: Any, tokens: int) -> Any:
        lists, first_tokens = old(self, block_ids, tokens)
        return [list(reversed(ids)) if len(ids) > 2 else ids for ids in lists], first_tokens

    return offered


def stale_generation(old: Any) -> Any:
    """A word counts as good unless it says that a lease has ended: also the word of the slot's next owner."""

    def judge(self: WordCheck) -> tuple[int, str]:
        found, objection = old(self)
        return found, objection if found & ENDED_BIT else ""

    return judge


def shared_cap(old: Any) -> Any:  # noqa: ARG001
    """Bytes in flight are capped over all peers, also for a peer that has none."""

    def has_room(self: Schedule[Any], peer: Any, line: Any) -> bool:  # noqa: ARG001
        part = next(iter(line)).pending[0]
        return self._cap is None or not self.inflight_bytes or self.inflight_bytes + part.payload_bytes <= self._cap

    return has_room


def last_first(old: Any) -> Any:
    """Of a peer's waiting transfers the newest is posted first."""

    def take_part(self: Schedule[Any], peer: Any) -> Any:
        line = self._lines[peer]
        line.move_to_end(next(reversed(line)), last=False)
        return old(self, peer)

    return take_part


def waits_for_refused(old: Any) -> Any:
    """A refused connection is tried again until the request's time is over."""

    def plan_retry(self: Task[Any], now_s: float, chance: float) -> bool:
        error = self.session.error
        if error is None or error.code != "connection-refused":
            return bool(old(self, now_s, chance))
        self.next_attempt_s = now_s + 0.1
        return self.next_attempt_s < self.deadline_s

    return plan_retry


def unloads_all(old: Any) -> Any:
    """The agent of a removed peer is unloaded although its process lives."""

    def retire(self: PeerTable, peer: Any) -> None:
        peer.is_connected = False
        old(self, peer)

    return retire


def cancelled_counts(old: Any) -> Any:
    """A cancelled transfer goes on counting as queued."""

    def forget(self: Schedule[Any], transfer: Any) -> None:
        count = self.count
        old(self, transfer)
        self.count = count

    return forget


def seed_beyond_doubles(old: Any) -> Any:
    def draw(self: FencePool) -> int:
        return (1 << 53) + 2 * int(old(self)) + 1

    return draw


def always_alone(old: Any) -> Any:  # noqa: ARG001
    """Requests with the same ticket know nothing of each other."""
    return lambda *_a, **_n: None
