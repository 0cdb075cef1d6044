"""All plans of a dry run, as tables and text for people and as JSON for programs: loads, sizes, times, warnings, slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

from kv_topology.arithmetic import box_runs
from kv_topology.plan.plan import plan_transfer
from kv_topology.plan.staged import bytes_per_token
from kv_topology.tools.engine import build_engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology.geometry import RankGeometry
    from kv_topology.plan.plan import Rank, TransferPlan
    from kv_topology.plan.slices import SliceTable
    from kv_topology.tools.spec import DryRun

__all__ = [
    "Page",
    "Survey",
    "estimate_json",
    "estimate_page",
    "explain_text",
    "explain_values",
    "report_json",
    "report_page",
    "survey",
]

TINY_BYTES = 4096
"""Slices below this cost more per descriptor than per byte. Source: NIXL over UCX, 2 to 3.5 us per descriptor."""


@final
@dataclass(frozen=True)
class Survey:
    """Every consumer rank's plan.

    Attributes:
        run: The dry run.
        consumers: Geometry of the consumer's ranks.
        producers: Geometry of the producer's ranks.
        plans: Plan of each consumer rank, staged where that is cheaper.
    """

    run: DryRun
    consumers: Mapping[Rank, RankGeometry]
    producers: Mapping[Rank, RankGeometry]
    plans: Mapping[Rank, TransferPlan]

    def bytes_from(self, consumer: Rank, producer: Rank) -> float:
        """Return the bytes per token of the prompt, or of states per request, that one rank reads from another."""
        return sum(bytes_per_token(table) for table in self.plans[consumer].slices(producer))

    def descriptors_per_token(self, plan: TransferPlan) -> float:
        """Return descriptors per token of the kind of plan that was chosen."""
        staged = plan.estimate.staged_descriptors_per_token
        return staged if plan.is_staged and staged is not None else plan.estimate.direct_descriptors_per_token

    def transfer_ms(self, plan: TransferPlan) -> float:
        """Return the estimated time of the cost model's prompt."""
        staged = plan.estimate.staged_us
        return (staged if plan.is_staged and staged is not None else plan.estimate.direct_us) / 1e3

    def warnings(self) -> list[str]:
        """Return the warnings that a person should read before running this pair."""
        checks = (self._tiny_slices, self._unread_replicas, self._unequal_load, self._replicated_reads, self._staged)
        return [warning for check in checks if (warning := check())]

    def _read_ranks(self) -> list[Rank]:
        return sorted({rank for plan in self.plans.values() for rank in plan.producer_ranks})

    def _tiny_slices(self) -> str:
        tables = [table for plan in self.plans.values() for rank in plan.producer_ranks for table in plan.slices(rank)]
        least = min((int(table.columns.length.min()) for table in tables), default=TINY_BYTES)
        if least >= TINY_BYTES:
            return ""
        return f"tiny descriptors: slices as small as {least} bytes; larger blocks or equal layouts help"

    def _unread_replicas(self) -> str:
        idle = sorted(set(self.producers) - set(self._read_ranks()))
        return f"replicas without readers, only notified: {_ranks(idle)}" if idle else ""

    def _unequal_load(self) -> str:
        loads = [self._load(rank) for rank in self._read_ranks()]
        if not loads or max(loads) <= 1.05 * min(loads):
            return ""
        return f"unequal load: producer ranks send {min(loads):.0f} to {max(loads):.0f} bytes per token"

    def _replicated_reads(self) -> str:
        unique = self.unique_bytes()
        copies = sum(map(self._load, self._read_ranks())) / unique if unique else 1.0
        return (
            f"replicated reads: every byte is read {copies:.2f} times, by ranks that share it" if copies > 1.01 else ""
        )

    def _staged(self) -> str:
        staged = [rank for rank, plan in self.plans.items() if plan.is_staged]
        return f"staged: consumer ranks {_ranks(staged)} permute pages after the read" if staged else ""

    def _load(self, producer: Rank) -> float:
        """Return the bytes per token that a producer rank sends to all consumer ranks."""
        return sum(
            self.bytes_from(consumer, producer)
            for consumer, plan in self.plans.items()
            if producer in plan.producer_ranks
        )

    def unique_bytes(self) -> float:
        """Return the bytes per token of the whole model's cache without replicas; states count once per request."""
        model = self.run.model
        attention = sum(kind in {"attention", "sliding"} for kind in model.kinds)
        latent = sum(kind == "latent" for kind in model.kinds)
        per_token = attention * 2 * model.kv_heads * model.head_dim * model.element_bytes
        per_token += latent * (model.latent_dim * model.element_bytes + model.index_dim)
        states = sum(
            field.held_bytes * axis.size / geometry.tp_size / axis.count
            for geometry in self.producers.values()
            for region in geometry.regions
            for member in region.members
            if geometry.groups[member.group].is_state
            for field in member.layout.fields
            if (axis := field.split_axis) is not None
        )
        return per_token + states


def _ranks(ranks: Sequence[Rank]) -> str:
    shown = ", ".join(f"pp{pp}/tp{tp}" if pp else f"tp{tp}" for pp, tp in ranks[:6])
    return shown + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")


def survey(run: DryRun) -> Survey:
    """Return the plans of all consumer ranks of a dry run."""
    consumers, producers = build_engine(run.model, run.consumer), build_engine(run.model, run.producer)
    plans = {rank: plan_transfer(local, producers, staging="auto", cost=run.cost) for rank, local in consumers.items()}
    return Survey(run, consumers, producers, plans)


@final
@dataclass(frozen=True, slots=True)
class Page:
    """A table with the lines before and after it, to be printed as it is or drawn.

    Attributes:
        head: Lines before.
        columns: Heading of each column and its width; a negative one aligns to the left.
        rows: Cells.
        tail: Lines after.
    """

    head: Sequence[str]
    columns: Sequence[tuple[str, int]]
    rows: Sequence[Sequence[str]]
    tail: Sequence[str]

    def as_text(self) -> str:
        """Return the page as lines that look the same everywhere."""
        cells = [[heading for heading, _ in self.columns], *self.rows]
        return "\n".join([*self.head, *(self._line(row) for row in cells), *self.tail])

    def _line(self, row: Sequence[str]) -> str:
        padded = [
            cell.ljust(-width) if width < 0 else cell.rjust(width)
            for cell, (_, width) in zip(row, self.columns, strict=True)
        ]
        return " ".join(padded).rstrip()


def _rank_name(rank: Rank) -> str:
    return f"{rank[0]}/{rank[1]}"


def _chosen(found: Survey, only: int | None) -> list[Rank]:
    return [rank for rank in sorted(found.plans) if only is None or rank[1] == only]


def _size(count: float) -> str:
    """Return bytes with a unit of powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def report_page(found: Survey, *, only: int | None = None) -> Page:
    """Return the table of who reads what from whom, sizes and times, and warnings.

    Args:
        found: All plans.
        only: Show only this consumer tp rank.
    """
    run = found.run
    head = [
        f"model: {len(run.model.kinds)} layers ({', '.join(run.model.group_kinds)})",
        _side("consumer", run.consumer),
        _side("producer", run.producer),
        "",
    ]
    columns = [
        ("consumer", 8),
        ("reads (pp/tp)", -22),
        ("notifies", -12),
        ("kind", -7),
        ("bytes/tok", 10),
        ("desc/tok", 9),
        (f"{run.cost.prompt_tokens}-token prompt", -1),
    ]
    warnings = [f"warning: {text}" for text in found.warnings()] or ["no warnings"]
    tail = ["", f"readers per producer rank: {_readers(found)}", _summary(found, only), *warnings]
    return Page(head, columns, [_row(found, rank) for rank in _chosen(found, only)], tail)


def _row(found: Survey, rank: Rank) -> list[str]:
    plan = found.plans[rank]
    return [
        _rank_name(rank),
        _list(plan.producer_ranks),
        _list(plan.notify_only_ranks),
        "staged" if plan.is_staged else "direct",
        f"{plan.estimate.bytes_per_token:.0f}",
        f"{found.descriptors_per_token(plan):.3f}",
        f"{_size(_moved(found, plan))}, {_descriptors(found, plan):.0f} descriptors, {found.transfer_ms(plan):.2f} ms",
    ]


def _moved(found: Survey, plan: TransferPlan) -> float:
    """Return the bytes of the cost model's prompt."""
    return plan.estimate.bytes_per_token * found.run.cost.prompt_tokens + plan.estimate.state_bytes


def _descriptors(found: Survey, plan: TransferPlan) -> float:
    return found.descriptors_per_token(plan) * found.run.cost.prompt_tokens + plan.estimate.state_descriptors


def estimate_page(found: Survey, *, only: int | None = None) -> Page:
    """Return the cost of every plan, direct and staged."""
    columns = [("consumer", 8), ("moved", 12), ("descriptors", 12), ("direct", 12), ("staged", 12), ("chosen", -6)]
    rows: list[list[str]] = []
    for rank in _chosen(found, only):
        plan = found.plans[rank]
        staged_us = plan.estimate.staged_us
        staged = "-" if staged_us is None else f"{staged_us / 1e3:.2f} ms"
        chosen = "staged" if plan.is_staged else "direct"
        direct = f"{plan.estimate.direct_us / 1e3:.2f} ms"
        rows.append(
            [_rank_name(rank), _size(_moved(found, plan)), f"{_descriptors(found, plan):.0f}", direct, staged, chosen]
        )
    return Page([], columns, rows, ["", _summary(found, only)])


def estimate_json(found: Survey, *, only: int | None = None) -> dict[str, object]:
    """Return the cost of every plan in plain values."""
    return {
        "prompt_tokens": found.run.cost.prompt_tokens,
        "bandwidth_gb_s": found.run.cost.bandwidth_gb_s,
        "descriptor_us": found.run.cost.descriptor_us,
        "ranks": [
            {
                "consumer_rank": list(rank),
                "is_staged": found.plans[rank].is_staged,
                "moved_bytes": _moved(found, found.plans[rank]),
                "descriptors": _descriptors(found, found.plans[rank]),
                "direct_us": found.plans[rank].estimate.direct_us,
                "staged_us": found.plans[rank].estimate.staged_us,
            }
            for rank in _chosen(found, only)
        ],
    }


def _summary(found: Survey, only: int | None) -> str:
    cost = found.run.cost
    slowest_ms = max(found.transfer_ms(found.plans[rank]) for rank in _chosen(found, only))
    prices = f"{cost.bandwidth_gb_s:g} GB/s per rank and {cost.descriptor_us:g} us per descriptor"
    return (
        f"a {cost.prompt_tokens}-token prompt takes about {slowest_ms:.2f} ms at {prices}, before neighbours are joined"
    )


def _side(name: str, engine: object) -> str:
    fields = ("tp", "pp", "dcp", "block_tokens", "kernel_block_tokens", "layout")
    return f"{name}: " + ", ".join(
        f"{key} {getattr(engine, key)}" for key in fields if getattr(engine, key) not in {0, ""}
    )


def _list(ranks: tuple[Rank, ...]) -> str:
    shown = " ".join(_rank_name(rank) for rank in ranks[:5])
    return (shown + f" +{len(ranks) - 5}" if len(ranks) > 5 else shown) or "-"


def _readers(found: Survey) -> str:
    plan = next(iter(found.plans.values()))
    counts = [plan.reader_count(rank) for rank in sorted(found.producers)]
    return str(counts[0]) if len(set(counts)) == 1 else " ".join(str(count) for count in counts)


def report_json(found: Survey, *, only: int | None = None) -> dict[str, object]:
    """Return plans with all their slices in plain values, so that others can check them."""
    run = found.run
    return {
        "consumer": {"tp": run.consumer.tp, "pp": run.consumer.pp, "layout": run.consumer.layout},
        "producer": {"tp": run.producer.tp, "pp": run.producer.pp, "layout": run.producer.layout},
        "prompt_tokens": run.cost.prompt_tokens,
        "warnings": found.warnings(),
        "plans": [_plan_json(found, rank) for rank in _chosen(found, only)],
    }


def _plan_json(found: Survey, rank: Rank) -> dict[str, object]:
    plan = found.plans[rank]
    estimate = plan.estimate
    return {
        "consumer_rank": list(rank),
        "is_staged": plan.is_staged,
        "bytes_per_token": estimate.bytes_per_token,
        "state_bytes": estimate.state_bytes,
        "descriptors_per_token": found.descriptors_per_token(plan),
        "transfer_ms": found.transfer_ms(plan),
        "notify_only": [list(other) for other in plan.notify_only_ranks],
        "producers": [_producer_json(plan, other) for other in plan.producer_ranks],
    }


def _producer_json(plan: TransferPlan, rank: Rank) -> dict[str, object]:
    return {
        "rank": list(rank),
        "readers": plan.reader_count(rank),
        "rows": len(plan.peer_rows(rank)),
        "groups": [_table_json(table) for table in plan.slices(rank)],
    }


def _table_json(table: SliceTable) -> dict[str, object]:
    pairing = table.pairing
    return {
        "local_group": pairing.local_group,
        "peer_group": pairing.peer_group,
        "unit_tokens": pairing.unit_tokens,
        "local_units": pairing.local_units,
        "peer_units": pairing.peer_units,
        "columns": [*table.columns._fields[:-1], "length_bytes"],
        "slices": [list(row) for row in zip(*(column.tolist() for column in table.columns), strict=True)],
    }


_SHOWN_CONTENTS = 4


class _Share(NamedTuple):
    """Parts of a field's split axis that a rank holds, [start, stop) of `size`; no axis: the whole field."""

    field: str
    axis: str = ""
    start: int = 0
    stop: int = 0
    size: int = 0


class _Slice(NamedTuple):
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


def explain_values(found: Survey, rank: Rank, *, most: int) -> dict[str, object]:
    """Return the explanation of a rank's plan in plain values, with the first `most` slices of every producer rank."""
    plan, estimate = found.plans[rank], found.plans[rank].estimate
    return {
        "consumer_rank": list(rank),
        "holds": [share._asdict() for share in _shares(found.consumers[rank])],
        "reads": [
            {
                "producer_rank": list(producer),
                "holds": [share._asdict() for share in _shares(found.producers[producer])],
                "readers": plan.reader_count(producer),
                "moves": _moved_words(plan, producer),
                "slices": sum(map(len, plan.slices(producer))),
                "first_slices": [each._asdict() for each in _slices(found, rank, producer, most)],
            }
            for producer in plan.producer_ranks
        ],
        "notifies": [list(producer) for producer in plan.notify_only_ranks],
        "is_staged": plan.is_staged,
        "direct_ms": estimate.direct_us / 1e3,
        "staged_ms": None if estimate.staged_us is None else estimate.staged_us / 1e3,
    }


def explain_text(found: Survey, rank: Rank, *, most: int) -> str:
    """Return the explanation of a rank's plan as text for a person."""
    plan = found.plans[rank]
    lines = [f"consumer rank {_rank_name(rank)} holds {_held(found.consumers[rank])}"]
    for producer in plan.producer_ranks:
        count = sum(map(len, plan.slices(producer)))
        lines += [
            "",
            f"from producer rank {_rank_name(producer)}, which holds {_held(found.producers[producer])}:",
            f"  {_moved_words(plan, producer)} in {count} slices; it waits for {plan.reader_count(producer)} readers",
            *(f"  {_in_words(each)}" for each in _slices(found, rank, producer, most)),
            *([f"  and {count - most} more"] if count > most else []),
        ]
    if plan.notify_only_ranks:
        names = ", ".join(map(_rank_name, plan.notify_only_ranks))
        lines += ["", f"only notified: {names}; others hold the same, but these wait for this reader too"]
    return "\n".join([*lines, "", _kind(plan)])


def _shares(geometry: RankGeometry) -> list[_Share]:
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


def _moved_words(plan: TransferPlan, producer: Rank) -> str:
    """Return the bytes per token, and those of states per request. Example: 4096 bytes a token."""
    moved = [0.0, 0.0]
    for table in plan.slices(producer):
        moved[table.pairing.local.is_state] += bytes_per_token(table)
    words = [f"{count:.0f} bytes {of}" for count, of in zip(moved, ("a token", "of states"), strict=True) if count]
    return " and ".join(words) or "nothing"


def _slices(found: Survey, rank: Rank, producer: Rank, most: int) -> list[_Slice]:
    slices: list[_Slice] = []
    for table in found.plans[rank].slices(producer):
        pairing = table.pairing
        rows = zip(*(column[: most - len(slices)].tolist() for column in table.columns), strict=True)
        for region, offset, step, peer_region, peer_offset, peer_step, length in rows:
            contents = _contents_of(found.consumers[rank], region, pairing.local_group, offset, offset + length)
            here = (region, offset, step, pairing.local_units)
            there = (peer_region, peer_offset, peer_step, pairing.peer_units)
            slices.append(_Slice(contents, length, pairing.unit_tokens, *here, *there))
    return slices


def _in_words(each: _Slice) -> str:
    """Return a line. Example: 16 tokens: 8192 bytes of region 0 at 32768 + 8192 x unit of 2 -> region 0 at 0 (...)."""
    named = [f"{field} of {layer}" for layer, field in each.contents[:_SHOWN_CONTENTS]]
    more = ", ..." if len(each.contents) > _SHOWN_CONTENTS else ""
    unit = f"{each.unit_tokens} tokens" if each.unit_tokens else "a state"
    source, target = _place(*each[7:11]), _place(*each[3:7])
    return f"{unit}: {each.length_bytes} bytes of {source} -> {target} ({', '.join(named)}{more})"


def _place(region: int, offset: int, step: int, units: int) -> str:
    return f"region {region} at {offset}" + (f" + {step} x unit of {units}" if units > 1 else "")


def _kind(plan: TransferPlan) -> str:
    estimate = plan.estimate
    direct = f"read directly {estimate.direct_us / 1e3:.2f} ms"
    if estimate.staged_us is None:
        return f"direct: {direct}; whole pages cannot be read and put in order here"
    staged = f"whole pages, put in order here {estimate.staged_us / 1e3:.2f} ms"
    return f"{'staged' if plan.is_staged else 'direct'}, the cheaper of the two: {direct}, {staged}"


def _contents_of(geometry: RankGeometry, region: int, group: int, start: int, stop: int) -> tuple[tuple[str, str], ...]:
    """Return the (layer, field) pairs of a group that have bytes in [start, stop) of a region's pages."""
    found: list[tuple[str, str]] = []
    for member in geometry.regions[region].members:
        if member.group == group:
            for part in member.layout.fields:
                axes = [(axis.count, axis.stride_bytes, axis.stride_bytes) for axis in part.axes]
                runs = box_runs(axes, part.element_bytes, member.offset_bytes + part.offset_bytes, 0)
                if bool(((runs.here < stop) & (runs.here + runs.length > start)).any()):
                    found.append((member.layer, part.name))
    return tuple(found)
