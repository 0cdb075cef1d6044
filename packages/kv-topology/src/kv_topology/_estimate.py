"""Sizes and times of a plan, per token of the prompt and per request, by the prices of a cost model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_topology._shards import tokens_meet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kv_topology._slices import SliceTable
    from kv_topology._staged import StagedRegion

    Tables = Mapping[tuple[int, int], Sequence[SliceTable]]

__all__ = ["CostModel", "Estimate", "bytes_per_token", "make_estimate"]


@final
@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices of a transfer; the defaults are of one host over shared memory, measure yours.

    Attributes:
        descriptor_us: Time per descriptor.
        bandwidth_gb_s: Bytes over the wire, in 1e9 bytes per second.
        permute_gb_s: Bytes put in order by the receiver.
        permute_launch_us: Time per region that is permuted, however small.
        prompt_tokens: Length of the prompt for which the two kinds of plan are compared.

    Source: NIXL 1.5.1 over UCX on one host, 2 to 3.5 us per descriptor and 8 to 10 GB/s.
    """

    descriptor_us: float = 2.5
    bandwidth_gb_s: float = 9.0
    permute_gb_s: float = 10.0
    permute_launch_us: float = 20.0
    prompt_tokens: int = 1024

    def direct_us(self, descriptors: float, moved_bytes: float) -> float:
        """Return the time of a transfer in microseconds."""
        return descriptors * self.descriptor_us + moved_bytes / self.bandwidth_gb_s / 1e3

    def permute_us(self, regions: int, moved_bytes: float) -> float:
        """Return the time of putting bytes in order in microseconds."""
        return regions * self.permute_launch_us + moved_bytes / self.permute_gb_s / 1e3


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """Sizes and times of a plan, before NIXL joins neighbouring descriptors.

    Attributes:
        bytes_per_token: Bytes received per token of the prompt, states left out.
        state_bytes: Bytes of states received per request.
        direct_descriptors_per_token: Descriptors per token of the direct plan.
        staged_descriptors_per_token: The same of the staged plan; None if there is none.
        state_descriptors: Descriptors of states per request.
        direct_us: Time of the direct plan for the cost model's prompt.
        staged_us: Time of the staged plan; None if there is none.
    """

    bytes_per_token: float
    state_bytes: int
    direct_descriptors_per_token: float
    staged_descriptors_per_token: float | None
    state_descriptors: int
    direct_us: float
    staged_us: float | None

    @property
    def is_staged_cheaper(self) -> bool:
        """Whether the staged plan exists and takes less time."""
        return self.staged_us is not None and self.staged_us < self.direct_us


def _all(tables: Tables) -> Iterable[SliceTable]:
    return (table for found in tables.values() for table in found)


def _share(table: SliceTable) -> float:
    """Return units of this table per token of the prompt."""
    return tokens_meet(table.pairing.local.deal, table.pairing.peer.deal) / table.pairing.unit_tokens


def bytes_per_token(table: SliceTable) -> float:
    """Return the bytes of a table per token of the prompt; of states, per request."""
    moved = float(table.columns.length.sum())
    return moved if table.pairing.local.is_state else moved * _share(table)


def _descriptors_per_token(tables: Tables) -> float:
    return sum(len(table) * _share(table) for table in _all(tables) if not table.pairing.local.is_state)


def make_estimate(tables: Tables, staged: tuple[Tables, Sequence[StagedRegion]] | None, cost: CostModel) -> Estimate:
    """Return the cost of the direct plan and, if there is one, of the staged plan, for the cost model's prompt."""
    per_token = sum(bytes_per_token(table) for table in _all(tables) if not table.pairing.local.is_state)
    states = [table for table in _all(tables) if table.pairing.local.is_state]
    state_bytes = sum(int(table.columns.length.sum()) for table in states)
    state_descriptors = sum(len(table) for table in states)
    moved = per_token * cost.prompt_tokens
    direct = _descriptors_per_token(tables)
    direct_us = cost.direct_us(direct * cost.prompt_tokens + state_descriptors, moved + state_bytes)
    staged_descriptors = staged_us = None
    if staged is not None:
        staged_descriptors = _descriptors_per_token(staged[0])
        count = staged_descriptors * cost.prompt_tokens + state_descriptors
        staged_us = cost.direct_us(count, moved + state_bytes) + cost.permute_us(len(staged[1]), moved)
    return Estimate(per_token, state_bytes, direct, staged_descriptors, state_descriptors, direct_us, staged_us)
