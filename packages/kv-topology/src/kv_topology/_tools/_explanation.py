"""Explanation of one consumer rank's plan: shares of both sides, slices with their contents, direct or staged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, final

from kv_topology._canonical import contents_of
from kv_topology._estimate import bytes_per_token
from kv_topology._tools._report import rank_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._model import RankGeometry
    from kv_topology._plan import TransferPlan
    from kv_topology._slices import SliceTable
    from kv_topology._tools._survey import Survey

    Rank = tuple[int, int]

__all__ = ["explain_text", "explain_values"]

_SHOWN_CONTENTS = 4


@final
@dataclass(frozen=True, slots=True)
class _Share:
    """Parts of a field's split axis that a rank holds, [start, stop) of `size`; no axis: the whole field."""

    field: str
    axis: str = ""
    start: int = 0
    stop: int = 0
    size: int = 0


@final
@dataclass(frozen=True, slots=True)
class _Slice:
    """Slice of a plan, and the (layer, field) pairs that have bytes in it."""

    contents: Sequence[tuple[str, str]]
    length_bytes: int
    unit_tokens: int
    local_region: int
    local_offset: int
    local_step: int
    local_units: int
    peer_region: int
    peer_offset: int
    peer_step: int
    peer_units: int

    def in_words(self) -> str:
        """Return a line. Example: 16 tokens: 8192 bytes of region 0 at 32768 + 8192 x unit of 2 -> region 0 at 0 (...)."""
        named = [f"{field} of {layer}" for layer, field in self.contents[:_SHOWN_CONTENTS]]
        more = ", ..." if len(self.contents) > _SHOWN_CONTENTS else ""
        unit = f"{self.unit_tokens} tokens" if self.unit_tokens else "a state"
        source = _place(self.peer_region, self.peer_offset, self.peer_step, self.peer_units)
        target = _place(self.local_region, self.local_offset, self.local_step, self.local_units)
        return f"{unit}: {self.length_bytes} bytes of {source} -> {target} ({', '.join(named)}{more})"


def _place(region: int, offset: int, step: int, units: int) -> str:
    return f"region {region} at {offset}" + (f" + {step} x unit of {units}" if units > 1 else "")


def explain_values(found: Survey, rank: Rank, *, most: int) -> dict[str, object]:
    """Return the explanation in plain values, with the first `most` slices of every producer rank."""
    plan = found.plans[rank]
    estimate = plan.estimate
    return {
        "consumer_rank": list(rank),
        "holds": [asdict(share) for share in _shares(found.consumers[rank])],
        "reads": [
            {
                "producer_rank": list(producer),
                "holds": [asdict(share) for share in _shares(found.producers[producer])],
                "readers": plan.reader_count(producer),
                "moves": _moved(plan, producer),
                "slices": _slice_count(plan, producer),
                "first_slices": [asdict(each) for each in _slices(found, rank, producer, most)],
            }
            for producer in plan.producer_ranks
        ],
        "notifies": [list(producer) for producer in plan.notify_only_ranks],
        "is_staged": plan.is_staged,
        "direct_ms": estimate.direct_us / 1e3,
        "staged_ms": None if estimate.staged_us is None else estimate.staged_us / 1e3,
    }


def explain_text(found: Survey, rank: Rank, *, most: int) -> str:
    """Return the explanation as text for a person."""
    plan = found.plans[rank]
    lines = [f"consumer rank {rank_name(rank)} holds {_held(found.consumers[rank])}"]
    for producer in plan.producer_ranks:
        count = _slice_count(plan, producer)
        lines += [
            "",
            f"from producer rank {rank_name(producer)}, which holds {_held(found.producers[producer])}:",
            f"  {_moved(plan, producer)} in {count} slices; it waits for {plan.reader_count(producer)} readers",
            *(f"  {each.in_words()}" for each in _slices(found, rank, producer, most)),
            *([f"  and {count - most} more"] if count > most else []),
        ]
    if plan.notify_only_ranks:
        names = ", ".join(map(rank_name, plan.notify_only_ranks))
        lines += ["", f"only notified: {names}; others hold the same, but these wait for this reader too"]
    return "\n".join([*lines, "", _kind(plan)])


def _shares(geometry: RankGeometry) -> list[_Share]:
    """Return a rank's share of each field."""
    shares: dict[str, _Share] = {}
    for region in geometry.regions:
        for member in region.members:
            for field in member.layout.fields:
                axis = field.split_axis
                whole = _Share(field.name)
                share = whole if axis is None else _Share(field.name, axis.name, axis.start, axis.stop, axis.size)
                shares.setdefault(field.name, share)
    return list(shares.values())


def _held(geometry: RankGeometry) -> str:
    """Return the shares of a rank. Example: head 6 to 7 of 8 (key, value)."""
    fields_of: dict[str, list[str]] = {}
    for share in _shares(geometry):
        words = f"{share.axis} {share.start} to {share.stop - 1} of {share.size}" if share.axis else "all"
        fields_of.setdefault(words, []).append(share.field)
    return "; ".join(f"{words} ({', '.join(names)})" for words, names in fields_of.items())


def _slice_count(plan: TransferPlan, producer: Rank) -> int:
    return sum(map(len, plan.slices(producer)))


def _moved(plan: TransferPlan, producer: Rank) -> str:
    """Return the bytes per token, and those of states per request. Example: 4096 bytes a token."""
    moved = [0.0, 0.0]
    for table in plan.slices(producer):
        moved[table.pairing.local.is_state] += bytes_per_token(table)
    words = [f"{count:.0f} bytes {of}" for count, of in zip(moved, ("a token", "of states"), strict=True) if count]
    return " and ".join(words) or "nothing"


def _slices(found: Survey, rank: Rank, producer: Rank, most: int) -> list[_Slice]:
    tables = found.plans[rank].slices(producer)
    first = [(table, number) for table in tables for number in range(min(most, len(table)))][:most]
    return [_slice(found.consumers[rank], table, number) for table, number in first]


def _slice(local: RankGeometry, table: SliceTable, number: int) -> _Slice:
    columns, pairing = table.columns, table.pairing
    region, offset, length = (
        int(column[number]) for column in (columns.local_region, columns.local_offset, columns.length)
    )
    return _Slice(
        contents_of(local, region, pairing.local_group, offset, offset + length),
        length,
        pairing.unit_tokens,
        region,
        offset,
        int(columns.local_step[number]),
        pairing.local_units,
        int(columns.peer_region[number]),
        int(columns.peer_offset[number]),
        int(columns.peer_step[number]),
        pairing.peer_units,
    )


def _kind(plan: TransferPlan) -> str:
    estimate = plan.estimate
    direct = f"read directly {estimate.direct_us / 1e3:.2f} ms"
    if estimate.staged_us is None:
        return f"direct: {direct}; whole pages cannot be read and put in order here"
    staged = f"whole pages, put in order here {estimate.staged_us / 1e3:.2f} ms"
    return f"{'staged' if plan.is_staged else 'direct'}, the cheaper of the two: {direct}, {staged}"
