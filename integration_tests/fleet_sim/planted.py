"""Planted faults: one for each promise, and the checker that must find it.

A fault puts a wrong function in the place of one of production's. The place is a string, `module:Owner.function`: a renamed place
fails one fast test by name, and not the import of this table. The checker is a seed of plain or of streamed fleets, or the byte
oracle in its first cases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, final
from unittest.mock import patch

import numpy as np

_ENDED_BIT = 1 << 63
_ORACLE_CASES = 200


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: `defect` takes the function at `place` and returns what stands there instead; fleets find it by `seed`."""

    name: str
    place: str
    defect: Callable[[Any], Any]
    found_by: Literal["plain", "streams", "oracle"] = "plain"
    seed: int = 0

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant it for the time of a block."""
        module, _, path = self.place.partition(":")
        owner_path, _, name = path.rpartition(".")
        owner = resolve_name(f"{module}:{owner_path}")
        with patch.object(owner, name, self.defect(getattr(owner, name))):
            yield


def oracle_finds(fault: Fault) -> bool:
    """Tell whether the byte oracle finds a fault in its first cases, and nothing in that case without it."""
    folder = str(Path(__file__).parent.parent / "never_wrong")
    with patch.object(sys, "path", [folder, *sys.path]):
        try_seed: Callable[[int], tuple[object, str]] = resolve_name("oracle.runner:try_seed")
    with fault.planted():
        found = next((seed for seed in range(_ORACLE_CASES) if try_seed(seed)[1]), None)
    return found is not None and not try_seed(found)[1]


def _returning(value: object) -> Callable[[Any], Any]:
    """Return a defect that does nothing and returns a value."""
    return lambda _: lambda *_a, **_n: value


def _with(**changed: object) -> Callable[[Any], Any]:
    """Return a defect that passes other keyword arguments on."""
    return lambda old: lambda *a, **n: old(*a, **{**n, **changed})


def _after(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a defect that changes the result; `change` gets it and the arguments."""
    return lambda old: lambda *a, **n: change(old(*a, **n), *a, **n)


def _words_stay(old: Any) -> Any:
    """The word of an ended lease is never written."""
    return lambda thread, slot, generation: None if generation & _ENDED_BIT else old(thread, slot, generation)


def _unfenced(code: str, *_: Any) -> str:
    return "" if code == "no-fence-slot" else code


def _unverified(_: Any) -> Any:
    return lambda _seal, reader, fields, kind: reader.read(fields, kind)


def _reported_at_grant(old: Any) -> Any:
    def apply(keeper: Any, plan: Any) -> None:
        old(keeper, plan)
        for order in plan.grants:
            keeper._sent(order.request_id)

    return apply


def _given_up_at_once(old: Any) -> Any:
    def hold(handles: Any, hold: Any) -> None:
        old(handles, hold)
        handles.give_up(hold)

    return hold


def _last_first(old: Any) -> Any:
    def take_part(queue: Any) -> Any:
        for line in queue._lines.values():
            others = dict(line)
            newest = others.popitem()[0]
            line.clear()
            line.update({newest: None, **others})
        return old(queue)

    return take_part


def _waits_for_refused(old: Any) -> Any:
    """A refused connection is tried again until the request's time is over."""

    def plan_retry(task: Any, now_s: float, chance: float) -> bool:
        error = task.session.error
        if error is None or error.code != "connection-refused":
            return bool(old(task, now_s, chance))
        task.next_attempt_s, task._is_waiting = now_s + 0.1, True
        return bool(task.next_attempt_s < task._deadline_s)

    return plan_retry


def _whole_read(old: Any) -> Any:
    """A prefix hit is read once more, into blocks that others use."""
    return lambda rules, block_ids, _new, _start, tokens: old(rules, block_ids, block_ids, 0, tokens)


def _at_once(_: Any) -> Any:
    return lambda _marks, action: action()


def _never_voided(old: Any) -> Any:
    def before_forward(streams: Any, plan: Any, *arguments: Any) -> None:
        old(streams, plan._replace(streams=plan.streams._replace(voids=())), *arguments)
        streams._begun = plan

    return before_forward


def _unread(_: Any) -> Any:
    """An early read counts as soon as all of it is here, whatever the fence word says."""

    def unread(coordinator: Any, following: Any) -> None:
        if following.watch is not None:
            following.watch.end()
        coordinator.readers.fence_found(following.name, following.read.order.ticket.fence[1])

    return unread


def _without_the_end(pairs: Any, pairing: Any, local: Any, _: Any, tokens: int) -> Any:
    """Keep the pairs of units that begin before the end of what is ordered."""
    group, unit = pairing.local, pairing.unit_tokens
    if group.is_state or group.deal.size > 1:
        return pairs
    block, inside = np.divmod(pairs.local, group.block_tokens // unit)
    place = np.array([local.ids.tolist().index(number) for number in block.tolist()], np.int64) + local.first
    kept = place * group.block_tokens + inside * unit < tokens
    return type(pairs)(pairs.local[kept], pairs.peer[kept])


def _from_the_first_token(lists: Any, *_: Any) -> Any:
    return tuple(type(blocks)(blocks.ids, 0, blocks.null) for blocks in lists)


def _first_suffices(old: Any) -> Any:
    def close(coordinator: Any, read: Any, transfer_id: str) -> None:
        for other in read.transfers.keys() - {transfer_id}:
            del read.transfers[other], coordinator._transfers[other]
        old(coordinator, read, transfer_id)

    return close


def _reversed(groups: Any, *_: Any) -> Any:
    return groups[::-1]


def _other_heads(interval: Any, *_: Any) -> Any:
    start, stop, total = interval
    return (0, stop - start, total) if start else (total - stop, total - start, total)


_STATE, _WORKER = "kv_scheduler_state", "vllm_adapter.worker"
FAULTS = (
    Fault("fence-skipped", "kv_nixl_agent:TransferAgent.post_read", _with(fence=None), seed=20),
    Fault("fence-not-voided", "kv_nixl_agent:TransferThread.write_fence", _words_stay),
    Fault("ticket-without-fence", f"{_STATE}.scheduler.producer:Producers._refusal", _after(_unfenced), seed=2),
    Fault("ticket-not-bound", f"{_STATE}.scheduler.admission:_require_prompt", _returning(None), "oracle"),
    Fault("ticket-seal-unverified", f"{_STATE}.ticket.seal:TicketSeal.opened", _unverified, seed=4),
    Fault("lease-not-renewed", f"{_STATE}:LeaseTable.renew", _returning(True), seed=20),
    Fault("lease-never-expires", f"{_STATE}:LeaseTable.take_ended", _returning(())),
    Fault("lease-one-reader-is-all", f"{_STATE}:LeaseTable.read_complete", _with(reader_count=1), seed=57),
    Fault("lease-freed-at-grant", f"{_WORKER}.transfer.leases:LeaseKeeper.apply", _reported_at_grant),
    Fault("lease-quota-ignored", f"{_STATE}.fences:Outstanding.has_room", _returning(True), seed=4),
    Fault("sleep-leases-stay", f"{_WORKER}.transfer.leases:LeaseKeeper.end_all", _returning(None), seed=47),
    Fault("quarantine-released-early", "kv_nixl_agent.transfers.handles:Handles.hold", _given_up_at_once, seed=301),
    Fault("notification-nonce-ignored", f"{_STATE}.worker.leases:_is_stale", _returning(False), seed=67),
    Fault("newest-read-first", "kv_nixl_agent.transfers.queue:TransferQueue._take_part", _last_first, seed=303),
    Fault("refused-connection-waits", "kv_handshake.core.handshake:Handshake.plan_retry", _waits_for_refused, seed=456),
    Fault("hit-read-again", f"{_STATE}.values:BlockRules.wanted", _whole_read),
    Fault("mirror-not-restored", f"{_WORKER}.pages:HostMirror.restore", _returning(None)),
    Fault("stream-before-event", f"{_WORKER}.streams:ChunkMarks.then", _at_once, "streams", 3),
    Fault("stream-not-voided", f"{_WORKER}.streams:RankStreams.before_forward", _never_voided, "streams", 21),
    Fault("stream-fence-unread", f"{_WORKER}.transfer.streams:StreamCoordinator._read_fence", _unread, "streams", 876),
    Fault("stream-never-gives-way", f"{_STATE}:SchedulerState.give_way", _returning(""), "streams", 9),
    Fault("first-unit-shifted", f"{_STATE}.values:BlockRules.wanted", _after(_from_the_first_token), "oracle"),
    Fault("last-unit-missing", "kv_topology.plan.plan:pair_blocks", _after(_without_the_end), "oracle"),
    Fault("report-before-bytes", f"{_WORKER}.transfer.reads:ReadCoordinator._close_transfer", _first_suffices, "oracle"),
    Fault("pages-not-put-in-order", f"{_WORKER}.pages:ReadCompletion._convert", _returning(None), "oracle"),
    Fault("other-heads-announced", "vllm_adapter.cache.fields:_head_interval", _after(_other_heads), "oracle"),
    Fault("groups-change-places", "vllm_adapter.scheduler.side:SchedulerSide._transferable", _after(_reversed), "oracle"),
)  # fmt: skip
