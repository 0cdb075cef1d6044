"""A survey as text for people and as JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_topology._plan import TransferPlan
    from kv_topology._slices import SliceTable
    from kv_topology._tools._survey import Survey

    Rank = tuple[int, int]

__all__ = ["report_json", "report_text"]


_HEADING = f"{'consumer':>8} {'reads (pp/tp)':<22} {'notifies':<12} {'kind':<7} {'bytes/tok':>10} {'desc/tok':>9}"


def _name(rank: Rank) -> str:
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


def report_text(found: Survey, *, only: int | None = None) -> str:
    """Return the table of who reads what from whom, sizes and times, and warnings.

    Args:
        found: All plans.
        only: Show only this consumer tp rank.
    """
    run = found.run
    prompt = run.cost.prompt_tokens
    lines = [
        f"model: {len(run.model.kinds)} layers ({', '.join(run.model.group_kinds)})",
        _side("consumer", found.run.consumer),
        _side("producer", found.run.producer),
        "",
        f"{_HEADING} {prompt}-token prompt",
    ]
    for rank in _chosen(found, only):
        plan = found.plans[rank]
        estimate = plan.estimate
        moved = estimate.bytes_per_token * prompt + estimate.state_bytes
        descriptors = found.descriptors_per_token(plan) * prompt + estimate.state_descriptors
        lines.append(
            f"{_name(rank):>8} {_list(plan.producer_ranks):<22} {_list(plan.notify_only_ranks):<12} "
            f"{'staged' if plan.is_staged else 'direct':<7} {estimate.bytes_per_token:>10.0f} "
            f"{found.descriptors_per_token(plan):>9.3f} {_size(moved)}, {descriptors:.0f} descriptors, "
            f"{found.transfer_ms(plan):.2f} ms"
        )
    slowest = max(found.transfer_ms(found.plans[rank]) for rank in _chosen(found, only))
    lines += [
        "",
        f"readers per producer rank: {_readers(found)}",
        _summary(found, slowest),
    ]
    lines += [f"warning: {text}" for text in found.warnings()] or ["no warnings"]
    return "\n".join(lines)


def _summary(found: Survey, slowest_ms: float) -> str:
    cost = found.run.cost
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
    shown = " ".join(_name(rank) for rank in ranks[:5])
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
