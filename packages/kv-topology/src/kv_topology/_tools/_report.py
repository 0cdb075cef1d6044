"""A survey as tables for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._plan import TransferPlan
    from kv_topology._slices import SliceTable
    from kv_topology._tools._survey import Survey

    Rank = tuple[int, int]

__all__ = ["Page", "estimate_json", "estimate_page", "rank_name", "report_json", "report_page"]


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


def rank_name(rank: Rank) -> str:
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
    ]
    columns.append((f"{run.cost.prompt_tokens}-token prompt", -1))
    tail = ["", f"readers per producer rank: {_readers(found)}", _summary(found, only), *_warnings(found)]
    return Page(head, columns, [_row(found, rank) for rank in _chosen(found, only)], tail)


def _row(found: Survey, rank: Rank) -> list[str]:
    plan = found.plans[rank]
    return [
        rank_name(rank),
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


def _warnings(found: Survey) -> list[str]:
    return [f"warning: {text}" for text in found.warnings()] or ["no warnings"]


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
            [rank_name(rank), _size(_moved(found, plan)), f"{_descriptors(found, plan):.0f}", direct, staged, chosen]
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
    shown = " ".join(rank_name(rank) for rank in ranks[:5])
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
