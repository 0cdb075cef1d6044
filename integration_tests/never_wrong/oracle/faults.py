"""Faults to plant, one or more in each module on the way from ticket to bytes: the oracle must find every one of them.

Each fault replaces one function of production. `Fault.plant` does it and returns how to undo it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kv_handshake import _codec
from kv_handshake._session import ClientSession
from kv_nixl_agent import _agent
from kv_nixl_agent._fences import FenceArray
from kv_nixl_agent._word_check import WordCheck
from kv_scheduler_state import _admission
from kv_scheduler_state._blocks import BlockList, BlockRules
from kv_scheduler_state._leases import LeaseTable
from kv_topology import TransferPlan, _link
from kv_topology._readers import Readers
from vllm_adapter.cache import fields
from vllm_adapter.scheduler.side import SchedulerSide
from vllm_adapter.worker.pages import ReadCompletion
from vllm_adapter.worker.transfer.leases import LeaseKeeper
from vllm_adapter.worker.transfer.peers import PeerDirectory
from vllm_adapter.worker.transfer.reads import ReadCoordinator

__all__ = ["FAULTS", "Fault", "planted"]

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Fault:
    """Replaces `owner.name` by `wrap(owner.name)`; to be found among the first `within` cases."""

    title: str
    package: str
    owner: Any
    name: str
    wrap: Wrap
    within: int = 60


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Plant a fault for the time of a block."""
    original = vars(fault.owner)[fault.name]
    changed: object
    if isinstance(original, property):
        assert original.fget is not None
        changed = property(fault.wrap(original.fget))
    else:
        changed = fault.wrap(original)
    setattr(fault.owner, fault.name, changed)
    try:
        yield
    finally:
        setattr(fault.owner, fault.name, original)


def _after(change: Callable[..., Any]) -> Wrap:
    """Change what a function returns; `change` gets the result and the arguments."""
    return lambda original: lambda *given, **named: change(original(*given, **named), *given, **named)


def _instead(other: Callable[..., Any]) -> Wrap:
    """Call something else, which gets the original first."""
    return lambda original: lambda *given, **named: other(original, *given, **named)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _rolled_pairs(pairs: Any, *_: Any) -> Any:
    return replace(pairs, peer=np.roll(pairs.peer, 1))


def _fewer_pairs(pairs: Any, *_: Any) -> Any:
    return type(pairs)(pairs.local[:-1], pairs.peer[:-1])


def _without_the_end(pairs: Any, pairing: Any, local: Any, _: Any, tokens: int) -> Any:
    """Keep the pairs of units that begin before the end of what is ordered."""
    group, unit = pairing.local, pairing.unit_tokens
    if group.is_state or group.deal.size > 1:
        return pairs
    block, inside = np.divmod(pairs.local, group.block_tokens // unit)
    place = np.array([local.ids.tolist().index(number) for number in block.tolist()], np.int64) + local.first
    kept = place * group.block_tokens + inside * unit < tokens
    return type(pairs)(pairs.local[kept], pairs.peer[kept])


def _one_page_on(pairs: Any, *_: Any) -> Any:
    return replace(pairs, local=pairs.local + (pairs.local < pairs.local.max(initial=0)))


def _rolled_rows(rows: Any, *_: Any) -> Any:
    changed = rows.copy()
    changed[:, 0] = np.roll(rows[:, 0], 1)
    return changed


def _shifted_rows(rows: Any, *_: Any) -> Any:
    changed = rows.copy()
    changed[:, 0] += changed[:, 1] * (changed[:, 4] > 1)
    changed[:, 4] -= changed[:, 4] > 1
    return changed


def _shorter_part(parts: Any, *_: Any) -> Any:
    if parts and len(parts[-1].local_indices) > 1:
        parts[-1].local_indices = parts[-1].local_indices[:-1]
        parts[-1].peer_indices = parts[-1].peer_indices[:-1]
    return parts


def _trusted(judged: tuple[int, str], *_: Any) -> tuple[int, str]:
    return judged[0], ""


def _never_voided(original: Callable[..., Any], fences: Any, slot: int, generation: int) -> None:
    if fences.read(slot) == 0:
        original(fences, slot, generation)


def _swapped_peers(peers: Any, *_: Any) -> Any:
    ranks = sorted(peers)
    return dict(zip(ranks, [peers[rank] for rank in (*ranks[1:], *ranks[:1])], strict=True))


def _to_the_first_rank(original: Callable[..., Any], directory: Any, engine: Any, _: Any, payload: bytes) -> None:
    original(directory, engine, engine.ranks[0], payload)


def _from_the_first_token(lists: Any, *_: Any) -> Any:
    return tuple(BlockList(blocks.ids, 0, blocks.null) for blocks in lists)


def _without_last(offered: Any, *_: Any) -> Any:
    lists, first_tokens = offered
    return [ids[:-1] if len(ids) > 1 else ids for ids in lists], first_tokens


def _swapped_blocks(offered: Any, *_: Any) -> Any:
    lists, first_tokens = offered
    return [[*ids[1:2], *ids[:1], *ids[2:]] for ids in lists], first_tokens


def _without_fences(ends: Any, *_: Any, **__: Any) -> Any:
    return tuple(replace(end, fence=None) if not hasattr(end, "_replace") else end._replace(fence=None) for end in ends)


@dataclass(frozen=True)
class _Without:
    """A plan that lacks some orders."""

    plan: Any
    lacks: str

    def __getattr__(self, name: str) -> Any:
        return () if name == self.lacks else getattr(self.plan, name)


def _lacking(orders: str) -> Wrap:
    return _instead(lambda original, table, plan, **named: original(table, _Without(plan, orders), **named))


def _wrong_heads(interval: Any, *_: Any) -> Any:
    start, stop, total = interval
    return (0, stop - start, total) if start else (total - stop, total - start, total)


def _as_good(original: Callable[..., Any], coordinator: Any, read: Any) -> None:
    read.code = read.message = ""
    original(coordinator, read)


def _first_rank_suffices(original: Callable[..., Any], coordinator: Any, read: Any, transfer_id: str) -> None:
    for other in read.transfers.keys() - {transfer_id}:
        del read.transfers[other], coordinator._transfers[other]
    original(coordinator, read, transfer_id)


def _one_reader(original: Callable[..., Any], request_id: str, _: int, **named: Any) -> Any:
    return original(request_id, 1, **named)


def _other_nonce(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return original(*given, **{**named, "nonce": "0"})


FAULTS = (
    Fault("blocks are paired one off", "kv_topology", _link, "pair_blocks", _after(_rolled_pairs)),
    Fault("the last pair of blocks is dropped", "kv_topology", _link, "pair_blocks", _after(_fewer_pairs)),
    Fault("the end of the last block is left", "kv_topology", _link, "pair_blocks", _after(_without_the_end)),
    Fault("a page lands on its neighbour", "kv_topology", _link, "pair_blocks", _after(_one_page_on)),
    Fault("heads are read from another head's place", "kv_topology", TransferPlan, "peer_rows", _after(_rolled_rows)),
    Fault("rows begin one page late", "kv_topology", TransferPlan, "local_rows", _after(_shifted_rows)),
    Fault("a producer waits for one reader too many", "kv_topology", Readers, "count", _after(lambda n, *_: n + 1)),
    Fault(
        "a producer waits for one reader too few",
        "kv_topology",
        Readers,
        "count",
        _after(lambda n, *_: max(1, n - 1)),
        200,
    ),
    Fault(
        "ranks without readers are forgotten",
        "kv_topology",
        TransferPlan,
        "notify_only_ranks",
        _after(lambda *_: ()),
        200,
    ),
    Fault("the last descriptor is never posted", "kv_nixl_agent", _agent, "split_into_parts", _after(_shorter_part)),
    Fault("a fence is read and not looked at", "kv_nixl_agent", WordCheck, "judge", _after(_trusted), 200),
    Fault("a fence word is never voided", "kv_nixl_agent", FenceArray, "write", _instead(_never_voided), 200),
    Fault("a rank's envelope is taken for another's", "kv_handshake", ClientSession, "peers", _after(_swapped_peers)),
    Fault(
        "a completion announces one reader", "kv_handshake", _codec, "encode_read_complete", _instead(_one_reader), 200
    ),
    Fault("a completion names another grant", "kv_handshake", _codec, "encode_read_complete", _instead(_other_nonce)),
    Fault("grants are not applied", "kv_scheduler_state", LeaseTable, "apply", _lacking("grants")),
    Fault(
        "an ended lease leaves its fence valid",
        "kv_scheduler_state",
        LeaseTable,
        "take_ended",
        _after(_without_fences),
        200,
    ),
    Fault(
        "lists begin with the first token",
        "kv_scheduler_state",
        BlockRules,
        "wanted",
        _after(_from_the_first_token),
        200,
    ),
    Fault("the ticket lacks the last block", "kv_scheduler_state", BlockRules, "offered", _after(_without_last)),
    Fault(
        "a ticket's first blocks change places", "kv_scheduler_state", BlockRules, "offered", _after(_swapped_blocks)
    ),
    Fault(
        "a ticket is not compared with the prompt",
        "kv_scheduler_state",
        _admission,
        "_require_prompt",
        _instead(_nothing),
        200,
    ),
    Fault(
        "notifications go to the wrong rank", "vllm_adapter", PeerDirectory, "notify", _instead(_to_the_first_rank), 200
    ),
    Fault("a rank says that it holds other heads", "vllm_adapter", fields, "_head_interval", _after(_wrong_heads)),
    Fault("received pages are not put in order", "vllm_adapter", ReadCompletion, "_convert", _instead(_nothing), 200),
    Fault(
        "the end is reported before all bytes are there",
        "vllm_adapter",
        ReadCoordinator,
        "_close_transfer",
        _instead(_first_rank_suffices),
    ),
    Fault("a failed read is reported as good", "vllm_adapter", ReadCoordinator, "_end", _instead(_as_good), 200),
    Fault(
        "groups of blocks change places",
        "vllm_adapter",
        SchedulerSide,
        "_transferable",
        _after(lambda g, *_: g[::-1]),
        200,
    ),
    Fault("lease ends are not looked for", "vllm_adapter", LeaseKeeper, "tick", _instead(_nothing)),
)
