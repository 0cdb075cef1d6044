"""Planted bugs: each is a patch of production by name, and each must be found by some seed.

Most of them are defects that this project, or vLLM's own connector, once had.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import kv_scheduler_state._leases
import vllm_adapter.worker.transfer.reads
from kv_handshake import Client
from kv_handshake._task import Task
from kv_nixl_agent import TransferAgent, TransferThread
from kv_nixl_agent._account import Account
from kv_nixl_agent._fences import FenceArray
from kv_nixl_agent._handles import Handles
from kv_nixl_agent._mailbox import Mailbox
from kv_nixl_agent._peers import PeerTable
from kv_nixl_agent._schedule import Schedule
from kv_nixl_agent._settling import Settling
from kv_nixl_agent._word_check import WordCheck
from kv_scheduler_state import AnnouncedFences, LeaseTable
from kv_scheduler_state._admission import Admissions
from kv_scheduler_state._blocks import BlockRules
from kv_scheduler_state._clock import ObservedClock
from kv_scheduler_state._fences import ENDED_BIT, FencePool
from kv_scheduler_state._handovers import HandOvers
from kv_scheduler_state._heartbeats import Heartbeats
from kv_scheduler_state._outbox import Outbox
from kv_scheduler_state._outstanding import Outstanding
from kv_scheduler_state._plan import StepPlan
from kv_scheduler_state._producer import Producers
from kv_scheduler_state._seal import TicketSeal
from kv_topology import TransferPlan
from vllm_adapter.scheduler.side import SchedulerSide
from vllm_adapter.steps import StepReport
from vllm_adapter.worker.engine_thread import WorkerSide
from vllm_adapter.worker.registration import Registration
from vllm_adapter.worker.transfer.leases import LeaseKeeper
from vllm_adapter.worker.transfer.peers import PeerDirectory
from vllm_adapter.worker.transfer.reads import ReadCoordinator

__all__ = ["BUGS"]

Bug = Callable[[ExitStack], None]


def _swap(owner: object, name: str, make: Callable[[Any], Any]) -> Bug:
    """Return a bug that puts `make(original)` in the place of a function."""

    def plant(stack: ExitStack) -> None:
        stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))

    return plant


def _nothing(owner: object, name: str, value: object = None) -> Bug:
    """Return a bug that makes a function do nothing."""
    return _swap(owner, name, lambda _: lambda *_a, **_n: value)


def _with(owner: object, name: str, **changed: object) -> Bug:
    """Return a bug that calls a function with other keyword arguments."""
    return _swap(owner, name, lambda old: lambda *a, **n: old(*a, **{**n, **changed}))


def _plan_without(owner: type, *parts: str) -> Bug:
    """Return a bug that loses parts of the step plan that `apply` or `perform` gets as its first argument."""
    name = "apply" if owner in {LeaseTable, AnnouncedFences} else "perform"
    lost: dict[str, Any] = dict.fromkeys(parts, ())
    return _swap(owner, name, lambda old: lambda self, plan, *a, **n: old(self, plan._replace(**lost), *a, **n))


def _sent_twice(old: Any) -> Any:
    """A lease's end is reported again with the next one's."""
    former: list[str] = []

    def report(self: LeaseKeeper, end: Any, heard_s: Any) -> None:
        for request_id in former:
            self._sent(request_id)
        former[:] = [end.request_id]
        old(self, end, heard_s)

    return report


def _loses_every(count: int) -> Callable[[Any], Any]:
    def make(old: Any) -> Any:
        numbers = itertools.count(1)

        def put(self: Mailbox, item: Any) -> None:
            if next(numbers) % count:
                old(self, item)

        return put

    return make


def _ended_bit_ignored(old: Any) -> Any:
    def judge(self: WordCheck) -> tuple[int, str]:
        found, objection = old(self)
        fence = self._order.fence
        return found, "" if fence is not None and found & ~ENDED_BIT == fence[1] else objection

    return judge


def _good_report(old: Any) -> Any:
    def take_report(self: WorkerSide) -> StepReport:
        report: StepReport = old(self)
        return StepReport(report.sent, report.received, frozenset(), report.registration)

    return take_report


def _mixed_up(old: Any) -> Any:
    def allocated(self: SchedulerSide, request_id: str, blocks: Any, new: Any, **named: Any) -> None:
        if named["external_tokens"]:
            blocks, new = ([list(reversed(ids)) for ids in lists] for lists in (blocks, new))
        old(self, request_id, blocks, new, **named)

    return allocated


def _first_tokens_zero(old: Any) -> Any:
    def offered(self: BlockRules, block_ids: Any, tokens: int) -> Any:
        lists, first_tokens = old(self, block_ids, tokens)
        return lists, [0] * len(first_tokens)

    return offered


def _short_read(old: Any) -> Any:
    def read(self: Outbox, request_id: str, order: Any) -> None:
        old(self, request_id, order._replace(tokens=max(0, order.tokens - 1)))

    return read


def _shifted_rows(old: Any) -> Any:
    def indices(self: TransferPlan, rank: Any, *arguments: Any, **named: Any) -> Any:
        mine, theirs = old(self, rank, *arguments, **named)
        return mine, theirs[::-1].copy()

    return indices


def _swapped_ranks(old: Any) -> Any:
    def wire_up(self: PeerDirectory, engine: Any, metadata: Any) -> None:
        ranks = list(metadata)
        old(self, engine, dict(zip(ranks, [metadata[rank] for rank in reversed(ranks)], strict=True)))

    return wire_up


def _same_scratch(old: Any) -> Any:
    def take(self: FenceArray, expected: int, **named: Any) -> int | None:
        word: int | None = old(self, expected, **named)
        if word is not None:
            self._free.appendleft(word)
        return word

    return take


def _early_count(old: Any) -> Any:
    """The first of several readers ends the lease."""
    return lambda self, *a, **n: old(self, *a, **{**n, "reader_count": 1})


def _slot_returned_early(old: Any) -> Any:
    def finish(self: Producers, request_id: str, record: Any, row: Any, blocks: Any, params: Any, now_s: float) -> None:
        old(self, request_id, record, row, blocks, params, now_s)
        if params is not None and record.fence is not None:
            self.fences.give_back(record.fence[0])
            record.fence = None

    return finish


def _only_good(old: Any) -> Any:
    """The end of a failed handshake is lost."""

    def ended(self: Client, *arguments: Any) -> None:
        *others, on_done = arguments
        old(self, *others, lambda outcome: on_done(outcome) if outcome.is_ok else None)

    return ended


def _first_transfer_ends(old: Any) -> Any:
    def close(self: ReadCoordinator, read: Any, transfer_id: str) -> None:
        read.transfers.clear()
        old(self, read, transfer_id)

    return close


def _both(*bugs: Bug) -> Bug:
    def plant(stack: ExitStack) -> None:
        for bug in bugs:
            bug(stack)

    return plant


def _late_fence(old: Any) -> Any:
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


def _no_ended_words(old: Any) -> Any:
    def write(self: TransferThread, slot: int, generation: int) -> None:
        if not generation & ENDED_BIT:
            old(self, slot, generation)

    return write


def _no_first_words(old: Any) -> Any:
    def write(self: TransferThread, slot: int, generation: int) -> None:
        if generation & ENDED_BIT:
            old(self, slot, generation)

    return write


def _unverified(old: Any) -> Any:  # noqa: ARG001
    def opened(self: TicketSeal, reader: Any, fields: Any, kind: Any) -> Any:  # noqa: ARG001
        return reader.ticket_of(fields, kind)

    return opened


def _unbound(old: Any) -> Any:  # noqa: ARG001
    def verified(self: Admissions, fields: Any, kind: Any, identity: Any) -> Any:  # noqa: ARG001
        return (
            self._tickets.ticket_of(fields, kind)
            if self.seal is None
            else self.seal.opened(self._tickets, fields, kind)
        )

    return verified


def _always_quiet(old: Any) -> Any:
    return lambda self, *a, **n: old(self, *a, **{**n, "is_memory_quiet": True})


def _hold_nothing(old: Any) -> Any:
    def hold(self: Handles, transfer: Any, now_s: float) -> None:
        old(self, transfer, now_s)
        self._give_up(transfer)

    return hold


def _early_free(old: Any) -> Any:
    """Blocks are reported free when the lease is granted."""

    def apply(self: LeaseKeeper, plan: Any, void: Any = ()) -> None:
        old(self, plan, void)
        for order in plan.grants:
            self._sent(order.request_id)

    return apply


def _one_reader_beats(old: Any) -> Any:
    def take_due(self: Heartbeats, now_s: float) -> Any:
        return [order._replace(readers=order.readers[:1]) for order in old(self, now_s)]

    return take_due


def _end_twice(old: Any) -> Any:
    def end(self: ReadCoordinator, read: Any) -> None:
        old(self, read)
        read.is_ended = False
        old(self, read)

    return end


def _unfenced(old: Any) -> Any:
    def refusal(self: Producers, record: Any, *arguments: Any) -> str:
        code: str = old(self, record, *arguments)
        return "" if code == "no-fence-slot" else code

    return refusal


def _whole_lists(old: Any) -> Any:
    """Windows are cut by count from the end of what is allocated, spare blocks among them."""

    def offered(self: BlockRules, block_ids: Any, tokens: int) -> Any:
        lists, first_tokens = old(self, block_ids, tokens)
        return [list(reversed(ids)) if len(ids) > 2 else ids for ids in lists], first_tokens

    return offered


def _stale_generation(old: Any) -> Any:
    """A word counts as good unless it says that a lease has ended: also the word of the slot's next owner."""

    def judge(self: WordCheck) -> tuple[int, str]:
        found, objection = old(self)
        return found, objection if found & ENDED_BIT else ""

    return judge


def _revokes_first(old: Any) -> Any:
    """Revocations are applied before the grants of the same step."""

    def apply(self: LeaseTable, plan: Any, **named: Any) -> Any:
        first = old(self, StepPlan(revokes=plan.revokes), **named)
        return first + old(self, plan._replace(revokes=()), **named)

    return apply


def _shared_cap(old: Any) -> Any:  # noqa: ARG001
    """Bytes in flight are capped over all peers, also for a peer that has none."""

    def has_room(self: Schedule[Any], peer: Any, line: Any) -> bool:  # noqa: ARG001
        part = next(iter(line)).pending[0]
        return self._cap is None or not self.inflight_bytes or self.inflight_bytes + part.payload_bytes <= self._cap

    return has_room


def _last_first(old: Any) -> Any:
    """Of a peer's waiting transfers the newest is posted first."""

    def take_part(self: Schedule[Any], peer: Any) -> Any:
        line = self._lines[peer]
        line.move_to_end(next(reversed(line)), last=False)
        return old(self, peer)

    return take_part


def _waits_for_refused(old: Any) -> Any:
    """A refused connection is tried again until the request's time is over."""

    def plan_retry(self: Task[Any], now_s: float, chance: float) -> bool:
        error = self.session.error
        if error is None or error.code != "connection-refused":
            return bool(old(self, now_s, chance))
        self.next_attempt_s = now_s + 0.1
        return self.next_attempt_s < self.deadline_s

    return plan_retry


def _unloads_all(old: Any) -> Any:
    """The agent of a removed peer is unloaded although its process lives."""

    def retire(self: PeerTable, peer: Any) -> None:
        peer.is_connected = False
        old(self, peer)

    return retire


def _cancelled_counts(old: Any) -> Any:
    """A cancelled transfer goes on counting as queued."""

    def forget(self: Schedule[Any], transfer: Any) -> None:
        count = self.count
        old(self, transfer)
        self.count = count

    return forget


def _seed_beyond_doubles(old: Any) -> Any:
    def draw(self: FencePool) -> int:
        return (1 << 53) + 2 * int(old(self)) + 1

    return draw


def _always_alone(old: Any) -> Any:  # noqa: ARG001
    """Requests with the same ticket know nothing of each other."""
    return lambda *_a, **_n: None


BUGS: dict[str, Bug] = {
    "handshake-waits-for-refused": _swap(Task, "plan_retry", _waits_for_refused),
    "ticket-without-fence-read": _swap(vllm_adapter.worker.transfer.reads, "refusal", lambda _: lambda *_a: None),
    "ticket-numbers-beyond-doubles": _swap(FencePool, "_draw", _seed_beyond_doubles),
    "read-never-retried": _swap(vllm_adapter.worker.transfer.reads, "may_retry", lambda _: lambda *_a: False),
    "siblings-know-nothing": _swap(HandOvers, "join", _always_alone),
    "peer-unloaded-alive": _swap(PeerTable, "retire", _unloads_all),
    "notification-nonce-ignored": _swap(kv_scheduler_state._leases, "_is_stale", lambda _: lambda *_a: False),
    "pause-ends-leases": _both(
        _swap(ObservedClock, "max_step_s", lambda _: property(lambda _s: 1e9, lambda _s, _v: None)),
        _swap(ObservedClock, "__init__", lambda old: lambda self, *_a: old(self, 1e9)),
        _nothing(Settling, "begin"),
    ),
    "scratch-word-lost": _nothing(FenceArray, "give_back"),
    "queue-count-leaks": _swap(Schedule, "forget", _cancelled_counts),
    "warm-up-handle-leaks": _nothing(Handles, "_end_watched"),
    "fence-stale-generation": _swap(WordCheck, "judge", _stale_generation),
    "fence-generations-repeat": _nothing(FencePool, "_draw", value=7),
    "revocation-not-ordered": _plan_without(LeaseTable, "revokes"),
    "revocation-before-grant": _swap(LeaseTable, "apply", _revokes_first),
    "engine-in-trouble-kept": _nothing(PeerDirectory, "drop"),
    "fence-skipped": _with(TransferThread, "post_read", fence=None),
    "fence-ended-bit-ignored": _swap(WordCheck, "judge", _ended_bit_ignored),
    "fence-not-voided": _swap(TransferThread, "write_fence", _no_ended_words),
    "fence-never-written": _swap(TransferThread, "write_fence", _no_first_words),
    "fence-voided-late": _swap(TransferThread, "write_fence", _late_fence),
    "fence-slot-leaks": _nothing(FencePool, "give_back"),
    "fence-slot-returned-early": _swap(Producers, "finish", _slot_returned_early),
    "fence-words-not-announced": _plan_without(AnnouncedFences, "fences"),
    "fence-scratch-shared": _swap(FenceArray, "take_scratch", _same_scratch),
    "ticket-without-fence": _swap(Producers, "_refusal", _unfenced),
    "ticket-not-bound": _swap(Admissions, "_verified", _unbound),
    "ticket-seal-unverified": _swap(TicketSeal, "opened", _unverified),
    "ticket-first-tokens": _swap(BlockRules, "offered", _first_tokens_zero),
    "ticket-blocks-reversed": _swap(BlockRules, "offered", _whole_lists),
    "lease-not-renewed": _nothing(LeaseTable, "renew", value=True),
    "lease-never-expires": _nothing(LeaseTable, "take_ended", value=()),
    "lease-one-reader-is-all": _swap(LeaseTable, "read_complete", _early_count),
    "lease-grant-lost": _plan_without(LeaseTable, "grants"),
    "lease-release-lost": _plan_without(LeaseTable, "releases"),
    "lease-freed-at-grant": _swap(LeaseKeeper, "apply", _early_free),
    "lease-reported-twice": _swap(LeaseKeeper, "_report", _sent_twice),
    "lease-quota-ignored": _swap(Outstanding, "has_room", lambda _: lambda *_a: True),
    "lease-account-leaks": _nothing(Outstanding, "end"),
    "heartbeats-stop": _nothing(Heartbeats, "take_due", value=[]),
    "heartbeats-for-one-only": _swap(Heartbeats, "take_due", _one_reader_beats),
    "quarantine-denied": _swap(Account, "result", _always_quiet),
    "quarantine-released-early": _swap(Handles, "hold", _hold_nothing),
    "quarantine-never-ends": _nothing(TransferAgent, "take_quiet", value=[]),
    "queue-cap-shared": _both(_swap(Schedule, "_has_room", _shared_cap), _nothing(Schedule, "_take_unserved")),
    "queue-last-first": _swap(Schedule, "_take_part", _last_first),
    "handles-leak": _nothing(Handles, "release"),
    "read-ends-with-first-rank": _swap(ReadCoordinator, "_close_transfer", _first_transfer_ends),
    "read-ends-twice": _swap(ReadCoordinator, "_end", _end_twice),
    "read-failure-hidden": _swap(WorkerSide, "take_report", _good_report),
    "read-one-token-short": _swap(Outbox, "read", _short_read),
    "read-blocks-mixed-up": _swap(SchedulerSide, "allocated", _mixed_up),
    "read-wrong-pages": _swap(TransferPlan, "indices", _shifted_rows),
    "ranks-swapped": _swap(PeerDirectory, "_wire_up", _swapped_ranks),
    "wake-up-lost": _nothing(PeerDirectory, "_handshake_ended"),
    "failed-handshake-lost": _both(
        _swap(Client, "_ended", _only_good), _nothing(PeerDirectory, "_fail_overdue"), _nothing(PeerDirectory, "_fail")
    ),
    "calls-lost": _swap(Mailbox, "put", _loses_every(25)),
    "sibling-never-woken": _nothing(HandOvers, "read_ended"),
    "cancelled-read-forgotten": _nothing(ReadCoordinator, "memory_quiet"),
    "step-plan-lost-on-error": _plan_without(Registration, "reads"),
}
