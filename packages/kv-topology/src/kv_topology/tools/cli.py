"""The command `kv-topology`: dry runs of transfers without an engine. The only module that imports typer.

A dry run is a survey of all plans. Its values are printed for `--json`, and the text for people is made of the same values.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from kv_topology import __version__
from kv_topology.arithmetic import box_runs, even_interval
from kv_topology.errors import InvalidGeometry, TopologyError
from kv_topology.plan.plan import plan_transfer
from kv_topology.plan.staged import bytes_per_token
from kv_topology.tools.engine import KV_LAYOUTS, build_engine
from kv_topology.tools.spec import load_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology.geometry import RankGeometry
    from kv_topology.plan.plan import Rank, TransferPlan
    from kv_topology.plan.slices import SliceTable
    from kv_topology.tools.spec import DryRun

__all__ = ["Survey", "app", "main", "survey", "warnings"]

_USAGE = 2
_NO_PLAN = 3

_LAYOUTS = "\b\nlayouts:\n" + "".join(
    f"  {name:<16} {layout.text}{f' (vLLM: {layout.alias})' if layout.alias else ''}\n"
    for name, layout in KV_LAYOUTS.items()
)
_EXIT_CODES = """\b
exit codes:
  0  done
  2  wrong usage, or an invalid specification
  3  no plan exists
"""
_EXAMPLE = "\b\nexample:\n  kv-topology --example > pair.toml\n  kv-topology {} pair.toml {}\n\n"
_TEXT = Path(__file__).with_name("example.toml").read_text(encoding="utf-8").rstrip()
_FORMAT = "\n\n".join("\b\n" + table for table in f"format:\n{_TEXT}".replace("\n", "\n  ").split("\n  \n")) + "\n\n"

Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="TOML or JSON file, in the format below.")]

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, epilog=f"{_LAYOUTS}\n{_EXIT_CODES}")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; ends by `SystemExit` with its exit code."""
    app(args=arguments, prog_name="kv-topology")
    raise SystemExit(0)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"kv-topology {__version__}")
        raise typer.Exit


def _print_example(asked: bool) -> None:
    if asked:
        _print(_TEXT)
        raise typer.Exit


@app.callback()
def _describe(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    example: Annotated[
        bool, typer.Option("--example", callback=_print_example, is_eager=True, help="Print an example specification.")
    ] = False,
) -> None:
    """Plan a KV-cache transfer and explain it: which bytes of which peer rank land where."""


def _fail(message: str, code: int) -> NoReturn:
    print(f"kv-topology: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _survey(spec: Path, rank: int | None) -> Survey:
    """Return all plans of a specification."""
    try:
        run = load_spec(spec)
    except InvalidGeometry as error:
        _fail(f"invalid specification {spec}: {error}", _USAGE)
    if rank is not None and not 0 <= rank < run.consumer.tp:
        _fail(f"--rank {rank}: the consumer has ranks 0 to {run.consumer.tp - 1}", _USAGE)
    try:
        return survey(run)
    except InvalidGeometry as error:
        _fail(f"{spec} describes no engine: {error}", _USAGE)
    except TopologyError as error:
        _fail(f"no plan: {error}", _NO_PLAN)


@app.command("plan", epilog=_EXAMPLE.format("plan", "--estimate") + _FORMAT + _EXIT_CODES)
def _plan(
    spec: Spec,
    *,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only what it costs, direct and staged.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="R", help="Only the consumer rank with this tp rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan a transfer between two engines, without any."""
    values = report_values(_survey(spec, rank), only=rank)
    _print(json.dumps(values, indent=1) if as_json else report_text(values, estimate=estimate))


@app.command("explain", epilog=_EXAMPLE.format("explain", "--rank 3") + _FORMAT + _EXIT_CODES)
def _explain(
    spec: Spec,
    *,
    rank: Annotated[int, typer.Option(metavar="R", help="The consumer rank with this tp rank.")] = 0,
    stage: Annotated[int, typer.Option(metavar="PP", help="Its pipeline stage.")] = 0,
    slices: Annotated[int, typer.Option(metavar="N", help="Slices to show of each producer rank.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain a rank's plan, slice by slice."""
    found = _survey(spec, rank)
    if (stage, rank) not in found.plans:
        _fail(f"--stage {stage}: the consumer has stages 0 to {found.run.consumer.pp - 1}", _USAGE)
    values = explain_values(found, (stage, rank), most=max(slices, 0))
    _print(json.dumps(values, indent=1) if as_json else explain_text(values))


def _print(text: str) -> None:
    """Print, and exit quietly on a closed pipe (`... | head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Discard the output that Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


Values = dict[str, Any]

TINY_BYTES = 4096
"""Slices below this cost more per descriptor than per byte. Source: NIXL over UCX, 2 to 3.5 us per descriptor."""
_SHOWN_CONTENTS = 4


class Survey(NamedTuple):
    """Every consumer rank's plan, staged where that is cheaper, and the geometries of both engines' ranks."""

    run: DryRun
    consumers: Mapping[Rank, RankGeometry]
    producers: Mapping[Rank, RankGeometry]
    plans: Mapping[Rank, TransferPlan]


def survey(run: DryRun) -> Survey:
    """Return the plans of all consumer ranks of a dry run."""
    consumers, producers = build_engine(run.model, run.consumer), build_engine(run.producer_model, run.producer)
    plans = {rank: plan_transfer(local, producers, staging="auto", cost=run.cost) for rank, local in consumers.items()}
    return Survey(run, consumers, producers, plans)


def warnings(found: Survey) -> list[str]:
    """Return the warnings that a person should read before running this pair."""
    reads = [
        (rank, table) for plan in found.plans.values() for rank in plan.producer_ranks for table in plan.slices(rank)
    ]
    least = min((int(table.columns.length.min()) for _, table in reads), default=TINY_BYTES)
    sent: dict[Rank, float] = {}  # bytes per token of the prompt, or of states per request, by producer rank
    for rank, table in reads:
        sent[rank] = sent.get(rank, 0.0) + bytes_per_token(table)
    idle = sorted(set(found.producers) - set(sent))
    low, high = min(sent.values(), default=0.0), max(sent.values(), default=0.0)
    copies = sum(sent.values()) / sum(map(_whole_bytes, found.producers.values()))
    staged = [rank for rank, plan in found.plans.items() if plan.is_staged]
    checks = {
        f"tiny descriptors: slices as small as {least} bytes; larger blocks or equal layouts help": least < TINY_BYTES,
        f"replicas without readers, only notified: {_names(idle)}": bool(idle),
        f"unequal load: producer ranks send {low:.0f} to {high:.0f} bytes per token": high > 1.05 * low,
        f"replicated reads: every byte is read {copies:.2f} times, by ranks that share it": copies > 1.01,
        f"staged: consumer ranks {_names(staged)} permute pages after the read": bool(staged),
    }
    return [text for text, applies in checks.items() if applies]


def _whole_bytes(producer: RankGeometry) -> float:
    """Return a rank's part of the bytes per token of the whole cache without replicas; states count once per request.

    Example: of 2 heads on 4 ranks each holds one, half of the field; each counts 1 head / (1/2) / 4 ranks, half a head.
    """
    total = 0.0
    for member in (member for region in producer.regions for member in region.members):
        page_tokens = producer.groups[member.group].page_tokens or 1
        for field in member.layout.fields:
            parts = field.split_axis.size if field.split_axis else 1
            start, stop = even_interval(parts, producer.tp_size, producer.tp_rank)
            total += field.held_bytes / page_tokens * parts / (stop - start) / producer.tp_size
    return total


def report_values(found: Survey, *, only: int | None = None) -> Values:
    """Return what plans read and cost in plain values; `only` is a consumer tp rank."""
    run, settings = found.run, ("tp", "pp", "dcp", "block_tokens", "kernel_block_tokens", "layout")
    any_plan = next(iter(found.plans.values()))
    return {
        "model": {"layers": len(run.model.kinds), "kinds": list(run.model.group_kinds)},
        "consumer": {name: getattr(run.consumer, name) for name in settings},
        "producer": {name: getattr(run.producer, name) for name in settings},
        "prompt_tokens": run.cost.prompt_tokens,
        "bandwidth_gb_s": run.cost.bandwidth_gb_s,
        "descriptor_us": run.cost.descriptor_us,
        "readers": [any_plan.reader_count(rank) for rank in sorted(found.producers)],
        "warnings": warnings(found),
        "plans": [
            _plan_values(rank, plan, run.cost.prompt_tokens)
            for rank, plan in sorted(found.plans.items())
            if only is None or rank[1] == only
        ],
    }


def _plan_values(rank: Rank, plan: TransferPlan, tokens: int) -> Values:
    estimate = plan.estimate
    per_token, chosen_us = estimate.direct_descriptors_per_token, estimate.direct_us
    if plan.is_staged and estimate.staged_us is not None and estimate.staged_descriptors_per_token is not None:
        per_token, chosen_us = estimate.staged_descriptors_per_token, estimate.staged_us
    return {
        "consumer_rank": list(rank),
        "is_staged": plan.is_staged,
        "bytes_per_token": plan.bytes_per_token,
        "state_bytes": estimate.state_bytes,
        "moved_bytes": plan.bytes_per_token * tokens + estimate.state_bytes,
        "descriptors": per_token * tokens + estimate.state_descriptors,
        "descriptors_per_token": per_token,
        "transfer_ms": chosen_us / 1e3,
        "direct_ms": estimate.direct_us / 1e3,
        "staged_ms": None if estimate.staged_us is None else estimate.staged_us / 1e3,
        "notify_only": [list(other) for other in plan.notify_only_ranks],
        "producers": [
            {"rank": list(other), "readers": plan.reader_count(other), "rows": len(plan.peer_rows(other))}
            for other in plan.producer_ranks
        ],
    }


def report_text(values: Values, *, estimate: bool = False) -> str:
    """Return `report_values` as tables for a person: who reads what from whom, costs, and warnings; or the costs alone."""
    rows = [_cells(plan) for plan in values["plans"]]
    columns = ("consumer", "kind", "moved", "descriptors", "direct", "staged") if estimate else tuple(rows[0])
    cells = [columns, *([row[column] for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    slowest_ms = max(plan["transfer_ms"] for plan in values["plans"])
    prices = f"{values['bandwidth_gb_s']:g} GB/s per rank and {values['descriptor_us']:g} us per descriptor"
    prompt = f"a {values['prompt_tokens']}-token prompt takes about {slowest_ms:.2f} ms at {prices}"
    summary = f"{prompt}, before neighbours are joined"
    if estimate:
        return "\n".join([*table, "", summary])
    readers = [str(count) for count in values["readers"]]
    sides = [
        f"{side}: " + ", ".join(f"{name} {value}" for name, value in values[side].items() if value)
        for side in ("consumer", "producer")
    ]
    return "\n".join(
        [
            f"model: {values['model']['layers']} layers ({', '.join(values['model']['kinds'])})",
            *sides,
            "",
            *table,
            "",
            f"readers per producer rank: {readers[0] if len(set(readers)) == 1 else ' '.join(readers)}",
            summary,
            *([f"warning: {text}" for text in values["warnings"]] or ["no warnings"]),
        ]
    )


def _cells(plan: Values) -> dict[str, str]:
    """Return the table's cells of one plan by column."""
    return {
        "consumer": _name(plan["consumer_rank"]),
        "reads (pp/tp)": _names([producer["rank"] for producer in plan["producers"]]),
        "notifies": _names(plan["notify_only"]),
        "kind": "staged" if plan["is_staged"] else "direct",
        "bytes/tok": f"{plan['bytes_per_token']:.0f}",
        "desc/tok": f"{plan['descriptors_per_token']:.3f}",
        "moved": _size(plan["moved_bytes"]),
        "descriptors": f"{plan['descriptors']:.0f}",
        "direct": f"{plan['direct_ms']:.2f} ms",
        "staged": "-" if plan["staged_ms"] is None else f"{plan['staged_ms']:.2f} ms",
    }


def _name(rank: Sequence[int]) -> str:
    return f"{rank[0]}/{rank[1]}"


def _names(ranks: Sequence[Sequence[int]]) -> str:
    shown = " ".join(map(_name, ranks[:5]))
    return (shown + f" +{len(ranks) - 5}" if len(ranks) > 5 else shown) or "-"


def _size(count: float) -> str:
    """Return bytes with a unit of powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def explain_values(found: Survey, rank: Rank, *, most: int) -> Values:
    """Return a rank's plan in plain values, with the first `most` slices of every producer rank and what each rank holds."""
    plan, values = found.plans[rank], _plan_values(rank, found.plans[rank], found.run.cost.prompt_tokens)
    for producer, about in zip(plan.producer_ranks, values["producers"], strict=True):
        tables = plan.slices(producer)
        about |= {"holds": _shares(found.producers[producer]), "moves": _moves(tables)}
        about |= {"slices": sum(map(len, tables)), "first_slices": _slices(found.consumers[rank], tables, most)}
    return {**values, "holds": _shares(found.consumers[rank])}


def explain_text(values: Values) -> str:
    """Return the explanation that `explain_values` gives as text for a person."""
    lines = [f"consumer rank {_name(values['consumer_rank'])} holds {_held(values['holds'])}"]
    for read in values["producers"]:
        more = read["slices"] - len(read["first_slices"])
        lines += [
            "",
            f"from producer rank {_name(read['rank'])}, which holds {_held(read['holds'])}:",
            f"  {read['moves']} in {read['slices']} slices; it waits for {read['readers']} readers",
            *(f"  {_in_words(each)}" for each in read["first_slices"]),
            *([f"  and {more} more"] if more else []),
        ]
    if values["notify_only"]:
        names = ", ".join(map(_name, values["notify_only"]))
        lines += ["", f"only notified: {names}; others hold the same, but these wait for this reader too"]
    direct = f"read directly {values['direct_ms']:.2f} ms"
    if values["staged_ms"] is None:
        return "\n".join([*lines, "", f"direct: {direct}; whole pages cannot be read and put in order here"])
    staged = f"whole pages, put in order here {values['staged_ms']:.2f} ms"
    kind = "staged" if values["is_staged"] else "direct"
    return "\n".join([*lines, "", f"{kind}, the cheaper of the two: {direct}, {staged}"])


def _shares(geometry: RankGeometry) -> dict[str, list[str]]:
    """Return the fields of a rank by what it holds of them. Example: {"head 6 to 7 of 8": ["key", "value"]}."""
    shares: dict[str, str] = {}
    for member in (member for region in geometry.regions for member in region.members):
        for field in member.layout.fields:
            axis = field.split_axis
            held = "all" if axis is None else f"{axis.name} {axis.start} to {axis.stop - 1} of {axis.size}"
            shares.setdefault(field.name, held)
    return {held: [name for name, each in shares.items() if each == held] for held in shares.values()}


def _held(shares: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{held} ({', '.join(names)})" for held, names in shares.items())


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
        units = {name: getattr(pairing, name) for name in ("unit_tokens", "local_units", "peer_units")}
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
