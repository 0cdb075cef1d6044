"""Planted bugs: each is a patch of production by name, and each must be found by some seed.

Most of them are defects that this project, or vLLM's own connector, once had.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import bugs_of_worlds
import defects
from bugs_of_streams import STREAM_BUGS

import kv_nixl_agent.loop
import kv_scheduler_state._admission
import kv_scheduler_state._leases
import vllm_adapter.worker.transfer.reads
from kv_handshake import Client
from kv_handshake._task import Task
from kv_nixl_agent import TransferAgent, TransferThread
from kv_nixl_agent.loop import Mailbox
from kv_nixl_agent.memory.peers import PeerTable
from kv_nixl_agent.transfers.handles import Handles
from kv_nixl_agent.transfers.queue import Schedule
from kv_nixl_agent.transfers.transfer import Account, Transfer
from kv_nixl_agent.words.fences import FenceArray
from kv_scheduler_state import AnnouncedFences, LeaseTable
from kv_scheduler_state._blocks import BlockRules
from kv_scheduler_state._clock import ObservedClock
from kv_scheduler_state._fences import FencePool
from kv_scheduler_state._handovers import HandOvers
from kv_scheduler_state._heartbeats import Heartbeats
from kv_scheduler_state._outbox import Outbox
from kv_scheduler_state._outstanding import Outstanding
from kv_scheduler_state._producer import Producers
from kv_scheduler_state._seal import TicketSeal
from kv_topology import TransferPlan
from vllm_adapter.scheduler.side import SchedulerSide
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


def _both(*bugs: Bug) -> Bug:
    def plant(stack: ExitStack) -> None:
        for bug in bugs:
            bug(stack)

    return plant


BUGS: dict[str, Bug] = {
    "handshake-waits-for-refused": _swap(Task, "plan_retry", defects.waits_for_refused),
    "ticket-without-fence-read": _swap(vllm_adapter.worker.transfer.reads, "refusal", lambda _: lambda *_a: None),
    "ticket-numbers-beyond-doubles": _swap(FencePool, "_draw", defects.seed_beyond_doubles),
    "read-never-retried": _swap(vllm_adapter.worker.transfer.reads, "may_retry", lambda _: lambda *_a: False),
    "siblings-know-nothing": _swap(HandOvers, "join", defects.always_alone),
    "peer-unloaded-alive": _swap(PeerTable, "retire", defects.unloads_all),
    "notification-nonce-ignored": _swap(kv_scheduler_state._leases, "_is_stale", lambda _: lambda *_a: False),
    "pause-ends-leases": _both(
        _swap(ObservedClock, "max_step_s", lambda _: property(lambda _s: 1e9, lambda _s, _v: None)),
        _swap(ObservedClock, "__init__", lambda old: lambda self, *_a: old(self, 1e9)),
        _swap(kv_nixl_agent.loop, "_CATCH_UP_S", lambda _: 0.0),
    ),
    "scratch-word-lost": _nothing(FenceArray, "give_back"),
    "queue-count-leaks": _swap(Schedule, "forget", defects.cancelled_counts),
    "warm-up-handle-leaks": _nothing(Handles, "_end_watched"),
    "fence-stale-generation": _swap(Transfer, "_verdict", defects.stale_generation),
    "fence-generations-repeat": _nothing(FencePool, "_draw", value=7),
    "revocation-not-ordered": _plan_without(LeaseTable, "revokes"),
    "engine-in-trouble-kept": _nothing(PeerDirectory, "drop"),
    "fence-skipped": _with(TransferThread, "post_read", fence=None),
    "fence-ended-bit-ignored": _swap(Transfer, "_verdict", defects.ended_bit_ignored),
    "fence-not-voided": _swap(TransferThread, "write_fence", defects.no_ended_words),
    "fence-never-written": _swap(TransferThread, "write_fence", defects.no_first_words),
    "fence-voided-late": _swap(TransferThread, "write_fence", defects.late_fence),
    "fence-slot-leaks": _nothing(FencePool, "give_back"),
    "fence-slot-returned-early": _swap(Producers, "finish", defects.slot_returned_early),
    "fence-words-not-announced": _plan_without(AnnouncedFences, "fences"),
    "fence-scratch-shared": _swap(FenceArray, "take_scratch", defects.same_scratch),
    "ticket-without-fence": _swap(Producers, "_refusal", defects.unfenced),
    "ticket-not-bound": _nothing(kv_scheduler_state._admission, "_require_prompt"),
    "ticket-seal-unverified": _swap(TicketSeal, "opened", defects.unverified),
    "ticket-first-tokens": _swap(BlockRules, "offered", defects.first_tokens_zero),
    "ticket-blocks-reversed": _swap(BlockRules, "offered", defects.whole_lists),
    "lease-not-renewed": _nothing(LeaseTable, "renew", value=True),
    "lease-never-expires": _nothing(LeaseTable, "take_ended", value=()),
    "lease-one-reader-is-all": _swap(LeaseTable, "read_complete", defects.early_count),
    "lease-grant-lost": _plan_without(LeaseTable, "grants"),
    "lease-release-lost": _plan_without(LeaseTable, "releases"),
    "lease-freed-at-grant": _swap(LeaseKeeper, "apply", defects.early_free),
    "lease-reported-twice": _swap(LeaseKeeper, "_report", defects.sent_twice),
    "lease-quota-ignored": _swap(Outstanding, "has_room", lambda _: lambda *_a: True),
    "lease-account-leaks": _nothing(Outstanding, "end"),
    "heartbeats-stop": _nothing(Heartbeats, "take_due", value=[]),
    "heartbeats-for-one-only": _swap(Heartbeats, "take_due", defects.one_reader_beats),
    "quarantine-denied": _swap(Account, "result", defects.always_quiet),
    "quarantine-released-early": _swap(Handles, "hold", defects.hold_nothing),
    "quarantine-never-ends": _nothing(TransferAgent, "take_quiet", value=[]),
    "queue-cap-shared": _both(_swap(Schedule, "_has_room", defects.shared_cap), _nothing(Schedule, "_take_unserved")),
    "queue-last-first": _swap(Schedule, "_take_part", defects.last_first),
    "handles-leak": _nothing(Handles, "release"),
    "read-ends-with-first-rank": _swap(ReadCoordinator, "_close_transfer", defects.first_transfer_ends),
    "read-ends-twice": _swap(ReadCoordinator, "_end", defects.end_twice),
    "read-failure-hidden": _swap(WorkerSide, "take_report", defects.good_report),
    "read-one-token-short": _swap(Outbox, "read", defects.short_read),
    "read-blocks-mixed-up": _swap(SchedulerSide, "allocated", defects.mixed_up),
    "read-wrong-pages": _swap(TransferPlan, "indices", defects.shifted_rows),
    "ranks-swapped": _swap(PeerDirectory, "_wire_up", defects.swapped_ranks),
    "wake-up-lost": _nothing(PeerDirectory, "_handshake_ended"),
    "failed-handshake-lost": _both(
        _swap(Client, "_ended", defects.only_good),
        _nothing(PeerDirectory, "_fail_overdue"),
        _nothing(PeerDirectory, "_fail"),
    ),
    "calls-lost": _swap(Mailbox, "put", defects.loses_every(25)),
    "sibling-never-woken": _nothing(HandOvers, "read_ended"),
    "cancelled-read-forgotten": _nothing(ReadCoordinator, "memory_quiet"),
    "step-plan-lost-on-error": _swap(Registration, "perform", defects.loses_reads),
    **{name: _swap(*parts) for name, parts in bugs_of_worlds.SWAPPED.items()},
    **{name: _nothing(*parts) for name, parts in bugs_of_worlds.NOTHING.items()},
    **STREAM_BUGS,
}
