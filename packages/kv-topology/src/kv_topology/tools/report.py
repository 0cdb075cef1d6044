"""All plans of a dry run: plain values for `--json`, and the text for people that shows the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from kv_topology.arithmetic import box_runs, even_interval
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
    "Survey",
    "estimate_text",
    "estimate_values",
    "explain_text",
    "explain_values",
    "report_text",
    "report_values",
    "survey",
    "warnings",
]

Values = dict[str, Any]

TINY_BYTES = 4096
"""Slices below this cost more per descriptor than per byte. Source: NIXL over UCX, 2 to 3.5 us per descriptor."""
_SHOWN_CONTENTS = 4


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

    def chosen(self, only: int | None) -> dict[Rank, TransferPlan]:
        """Return the plans of one consumer tp rank, or of all for None."""
        return {rank: plan for rank, plan in sorted(self.plans.items()) if only is None or rank[1] == only}

    def load(self, producer: Rank) -> float:
        """Return the bytes per token of the prompt, or of states per request, that a producer rank sends to all consumers."""
        plans = (plan for plan in self.plans.values() if producer in plan.producer_ranks)
        return sum(bytes_per_token(table) for plan in plans for table in plan.slices(producer))


def survey(run: DryRun) -> Survey:
    """Return the plans of all consumer ranks of a dry run."""
    consumers, producers = build_engine(run.model, run.consumer), build_engine(run.model, run.producer)
    plans = {rank: plan_transfer(local, producers, staging="auto", cost=run.cost) for rank, local in consumers.items()}
    return Survey(run, consumers, producers, plans)


def warnings(found: Survey) -> list[str]:
    """Return the warnings that a person should read before running this pair."""
    tables = [table for plan in found.plans.values() for rank in plan.producer_ranks for table in plan.slices(rank)]
    least = min((int(table.columns.length.min()) for table in tables), default=TINY_BYTES)
    read = {rank for plan in found.plans.values() for rank in plan.producer_ranks}
    idle = sorted(set(found.producers) - read)
    loads = [found.load(rank) for rank in read] or [0.0]
    copies = sum(loads) / _unique_bytes(found.producers)
    staged = [rank for rank, plan in found.plans.items() if plan.is_staged]
    checks = {
        f"tiny descriptors: slices as small as {least} bytes; larger blocks or equal layouts help": least < TINY_BYTES,
        f"replicas without readers, only notified: {_ranks(idle)}": bool(idle),
        f"unequal load: producer ranks send {min(loads):.0f} to {max(loads):.0f} bytes per token": (
            max(loads) > 1.05 * min(loads)
        ),
        f"replicated reads: every byte is read {copies:.2f} times, by ranks that share it": copies > 1.01,
        f"staged: consumer ranks {_ranks(staged)} permute pages after the read": bool(staged),
    }
    return [text for text, applies in checks.items() if applies]


def _unique_bytes(producers: Mapping[Rank, RankGeometry]) -> float:
    """Return the bytes per token of the whole cache without replicas; states count once per request.

    Example: of 2 heads on 4 ranks each holds one, half of the field; 4 ranks * 1 head / (1/2) / 4 ranks are 2 heads.
    """
    total = 0.0
    for rank in producers.values():
        for member in (member for region in rank.regions for member in region.members):
            page_tokens = rank.groups[member.group].page_tokens or 1
            for field in member.layout.fields:
                axis, share = field.split_axis, 1.0
                if axis is not None:
                    start, stop = even_interval(axis.size, rank.tp_size, rank.tp_rank)
                    share = (stop - start) / axis.size
                total += field.held_bytes / page_tokens / share / rank.tp_size
    return total


def _ranks(ranks: Sequence[Rank]) -> str:
    shown = ", ".join(f"pp{pp}/tp{tp}" if pp else f"tp{tp}" for pp, tp in ranks[:6])
    return shown + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")


def _costs(found: Survey, plan: TransferPlan) -> Values:
    """Return what the chosen kind of a plan costs for the cost model's prompt."""
    estimate, tokens = plan.estimate, found.run.cost.prompt_tokens
    per_token, chosen_us = estimate.direct_descriptors_per_token, estimate.direct_us
    if plan.is_staged and estimate.staged_us is not None and estimate.staged_descriptors_per_token is not None:
        per_token, chosen_us = estimate.staged_descriptors_per_token, estimate.staged_us
    return {
        "moved_bytes": estimate.bytes_per_token * tokens + estimate.state_bytes,
        "descriptors": per_token * tokens + estimate.state_descriptors,
        "descriptors_per_token": per_token,
        "transfer_ms": chosen_us / 1e3,
    }


def report_values(found: Survey, *, only: int | None = None) -> Values:
    """Return plans with all their slices in plain values, so that others can check them."""
    run = found.run
    return {
        "consumer": {"tp": run.consumer.tp, "pp": run.consumer.pp, "layout": run.consumer.layout},
        "producer": {"tp": run.producer.tp, "pp": run.producer.pp, "layout": run.producer.layout},
        "prompt_tokens": run.cost.prompt_tokens,
        "warnings": warnings(found),
        "plans": [
            {
                "consumer_rank": list(rank),
                "is_staged": plan.is_staged,
                "bytes_per_token": plan.estimate.bytes_per_token,
                "state_bytes": plan.estimate.state_bytes,
                **_costs(found, plan),
                "notify_only": [list(other) for other in plan.notify_only_ranks],
                "producers": [
                    {
                        "rank": list(other),
                        "readers": plan.reader_count(other),
                        "rows": len(plan.peer_rows(other)),
                        "groups": [_table_values(table) for table in plan.slices(other)],
                    }
                    for other in plan.producer_ranks
                ],
            }
            for rank, plan in found.chosen(only).items()
        ],
    }


def _table_values(table: SliceTable) -> Values:
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


def report_text(found: Survey, *, only: int | None = None) -> str:
    """Return the table of who reads what from whom, sizes and times, and warnings; `only` is a consumer tp rank."""
    run = found.run
    rows = [
        (
            "consumer",
            "reads (pp/tp)",
            "notifies",
            "kind",
            "bytes/tok",
            "desc/tok",
            f"{run.cost.prompt_tokens}-token prompt",
        )
    ]
    for rank, plan in found.chosen(only).items():
        costs = _costs(found, plan)
        prompt = f"{_size(costs['moved_bytes'])}, {costs['descriptors']:.0f} descriptors, {costs['transfer_ms']:.2f} ms"
        reads, notifies = _names(plan.producer_ranks), _names(plan.notify_only_ranks)
        per_token = f"{plan.estimate.bytes_per_token:.0f}", f"{costs['descriptors_per_token']:.3f}"
        rows.append((_name(rank), reads, notifies, _kind(plan), *per_token, prompt))
    any_plan = next(iter(found.plans.values()))
    counts = [str(any_plan.reader_count(rank)) for rank in sorted(found.producers)]
    return "\n".join(
        [
            f"model: {len(run.model.kinds)} layers ({', '.join(run.model.group_kinds)})",
            _side("consumer", run.consumer),
            _side("producer", run.producer),
            "",
            *_table(rows),
            "",
            f"readers per producer rank: {counts[0] if len(set(counts)) == 1 else ' '.join(counts)}",
            _summary(found, only),
            *([f"warning: {text}" for text in warnings(found)] or ["no warnings"]),
        ]
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _name(rank: Sequence[int]) -> str:
    return f"{rank[0]}/{rank[1]}"


def _names(ranks: Sequence[Rank]) -> str:
    shown = " ".join(map(_name, ranks[:5]))
    return (shown + f" +{len(ranks) - 5}" if len(ranks) > 5 else shown) or "-"


def _kind(plan: TransferPlan) -> str:
    return "staged" if plan.is_staged else "direct"


def _size(count: float) -> str:
    """Return bytes with a unit of powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _side(name: str, engine: object) -> str:
    settings = ("tp", "pp", "dcp", "block_tokens", "kernel_block_tokens", "layout")
    given = {key: getattr(engine, key) for key in settings}
    return f"{name}: " + ", ".join(f"{key} {value}" for key, value in given.items() if value)


def _summary(found: Survey, only: int | None) -> str:
    cost = found.run.cost
    slowest_ms = max(_costs(found, plan)["transfer_ms"] for plan in found.chosen(only).values())
    prices = f"{cost.bandwidth_gb_s:g} GB/s per rank and {cost.descriptor_us:g} us per descriptor"
    return (
        f"a {cost.prompt_tokens}-token prompt takes about {slowest_ms:.2f} ms at {prices}, before neighbours are joined"
    )


def estimate_values(found: Survey, *, only: int | None = None) -> Values:
    """Return the cost of every plan, direct and staged, in plain values."""
    return {
        "prompt_tokens": found.run.cost.prompt_tokens,
        "bandwidth_gb_s": found.run.cost.bandwidth_gb_s,
        "descriptor_us": found.run.cost.descriptor_us,
        "ranks": [
            {
                "consumer_rank": list(rank),
                "is_staged": plan.is_staged,
                **_costs(found, plan),
                "direct_us": plan.estimate.direct_us,
                "staged_us": plan.estimate.staged_us,
            }
            for rank, plan in found.chosen(only).items()
        ],
    }


def estimate_text(found: Survey, *, only: int | None = None) -> str:
    """Return the cost of every plan, direct and staged."""
    rows = [("consumer", "moved", "descriptors", "direct", "staged", "chosen")]
    for rank, plan in found.chosen(only).items():
        costs, estimate = _costs(found, plan), plan.estimate
        staged = "-" if estimate.staged_us is None else f"{estimate.staged_us / 1e3:.2f} ms"
        times = f"{estimate.direct_us / 1e3:.2f} ms", staged
        rows.append((_name(rank), _size(costs["moved_bytes"]), f"{costs['descriptors']:.0f}", *times, _kind(plan)))
    return "\n".join([*_table(rows), "", _summary(found, only)])


def explain_values(found: Survey, rank: Rank, *, most: int) -> Values:
    """Return the explanation of a rank's plan in plain values, with the first `most` slices of every producer rank."""
    plan, estimate = found.plans[rank], found.plans[rank].estimate
    return {
        "consumer_rank": list(rank),
        "holds": _shares(found.consumers[rank]),
        "reads": [
            {
                "producer_rank": list(producer),
                "holds": _shares(found.producers[producer]),
                "readers": plan.reader_count(producer),
                "moves": _moves(plan.slices(producer)),
                "slices": sum(map(len, plan.slices(producer))),
                "first_slices": _slices(found.consumers[rank], plan.slices(producer), most),
            }
            for producer in plan.producer_ranks
        ],
        "notifies": [list(producer) for producer in plan.notify_only_ranks],
        "is_staged": plan.is_staged,
        "direct_ms": estimate.direct_us / 1e3,
        "staged_ms": None if estimate.staged_us is None else estimate.staged_us / 1e3,
    }


def explain_text(values: Values) -> str:
    """Return the explanation that `explain_values` gives as text for a person."""
    lines = [f"consumer rank {_name(values['consumer_rank'])} holds {_held(values['holds'])}"]
    for read in values["reads"]:
        more = read["slices"] - len(read["first_slices"])
        lines += [
            "",
            f"from producer rank {_name(read['producer_rank'])}, which holds {_held(read['holds'])}:",
            f"  {read['moves']} in {read['slices']} slices; it waits for {read['readers']} readers",
            *(f"  {_in_words(each)}" for each in read["first_slices"]),
            *([f"  and {more} more"] if more else []),
        ]
    if values["notifies"]:
        names = ", ".join(map(_name, values["notifies"]))
        lines += ["", f"only notified: {names}; others hold the same, but these wait for this reader too"]
    direct = f"read directly {values['direct_ms']:.2f} ms"
    if values["staged_ms"] is None:
        return "\n".join([*lines, "", f"direct: {direct}; whole pages cannot be read and put in order here"])
    staged = f"whole pages, put in order here {values['staged_ms']:.2f} ms"
    kind = "staged" if values["is_staged"] else "direct"
    return "\n".join([*lines, "", f"{kind}, the cheaper of the two: {direct}, {staged}"])


def _shares(geometry: RankGeometry) -> list[Values]:
    """Return the parts of each field's split axis that a rank holds, [start, stop) of `size`; no axis: the whole field."""
    shares: dict[str, Values] = {}
    for member in (member for region in geometry.regions for member in region.members):
        for field in member.layout.fields:
            share: Values = {"field": field.name, "axis": "", "start": 0, "stop": 0, "size": 0}
            if axis := field.split_axis:
                share |= {"axis": axis.name, "start": axis.start, "stop": axis.stop, "size": axis.size}
            shares.setdefault(field.name, share)
    return list(shares.values())


def _held(shares: Sequence[Values]) -> str:
    """Return the shares of a rank. Example: head 6 to 7 of 8 (key, value)."""
    fields_of: dict[str, list[str]] = {}
    for share in shares:
        interval = f"{share['axis']} {share['start']} to {share['stop'] - 1} of {share['size']}"
        fields_of.setdefault(interval if share["axis"] else "all", []).append(share["field"])
    return "; ".join(f"{words} ({', '.join(names)})" for words, names in fields_of.items())


def _moves(tables: Sequence[SliceTable]) -> str:
    """Return the bytes per token, and those of states per request. Example: 4096 bytes a token."""
    moved = [0.0, 0.0]
    for table in tables:
        moved[table.pairing.local.is_state] += bytes_per_token(table)
    words = [f"{count:.0f} bytes {of}" for count, of in zip(moved, ("a token", "of states"), strict=True) if count]
    return " and ".join(words) or "nothing"


def _slices(local: RankGeometry, tables: Sequence[SliceTable], most: int) -> list[Values]:
    """Return the first slices, each with the (layer, field) pairs that have bytes in it."""
    slices: list[Values] = []
    for table in tables:
        pairing = table.pairing
        units = {
            "unit_tokens": pairing.unit_tokens,
            "local_units": pairing.local_units,
            "peer_units": pairing.peer_units,
        }
        for row in zip(*(column[: most - len(slices)].tolist() for column in table.columns), strict=True):
            values = dict(zip(table.columns._fields, row, strict=True))
            length, start = values.pop("length"), values["local_offset"]
            contents = _contents(local, values["local_region"], pairing.local_group, start, start + length)
            slices.append({"contents": contents, "length_bytes": length, **units, **values})
    return slices


def _contents(geometry: RankGeometry, region: int, group: int, start: int, stop: int) -> list[tuple[str, str]]:
    """Return the (layer, field) pairs of a group that have bytes in [start, stop) of a region's pages."""
    found: list[tuple[str, str]] = []
    for member in geometry.regions[region].members:
        for part in member.layout.fields if member.group == group else ():
            axes = [(axis.count, axis.stride_bytes, axis.stride_bytes) for axis in part.axes]
            runs = box_runs(axes, part.element_bytes, member.offset_bytes + part.offset_bytes, 0)
            if ((runs.here < stop) & (runs.here + runs.length > start)).any():
                found.append((member.layer, part.name))
    return found


def _in_words(each: Values) -> str:
    """Return a line. Example: 16 tokens: 8192 bytes of region 0 at 32768 + 8192 x unit of 2 -> region 0 at 0 (...)."""
    named = [f"{field} of {layer}" for layer, field in each["contents"][:_SHOWN_CONTENTS]]
    more = ", ..." if len(each["contents"]) > _SHOWN_CONTENTS else ""
    unit = f"{each['unit_tokens']} tokens" if each["unit_tokens"] else "a state"
    source, target = _place(each, "peer"), _place(each, "local")
    return f"{unit}: {each['length_bytes']} bytes of {source} -> {target} ({', '.join(named)}{more})"


def _place(each: Values, side: str) -> str:
    step = f" + {each[f'{side}_step']} x unit of {each[f'{side}_units']}" if each[f"{side}_units"] > 1 else ""
    return f"region {each[f'{side}_region']} at {each[f'{side}_offset']}{step}"
