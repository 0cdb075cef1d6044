"""A picture of who reads what from whom, as SVG written by hand.

Consumer ranks are rows on the left, producer ranks on the right. The bar of a rank shows the parts of the split axis
(heads or channels) that it holds, coloured by the producer rank from which they come; a line joins each consumer rank
to the ranks that it reads, thicker for more bytes, and a dotted one to those that it only notifies.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_topology._model import FieldLayout, RankGeometry
    from kv_topology._tools._survey import Survey

    Rank = tuple[int, int]

__all__ = ["draw"]

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
ROW, BAR, BAR_HEIGHT, LEFT, GAP, TOP, MARGIN = 44, 240, 20, 120, 260, 96, 24
STYLE = 'font-family="system-ui, sans-serif" font-size="13"'
LIMIT = 64
"""Ranks of one side that are drawn at most."""


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _widest_field(geometry: RankGeometry) -> FieldLayout | None:
    """Return the split field with the most parts: what the bar shows."""
    fields = [f for region in geometry.regions for m in region.members for f in m.layout.fields]
    split = [f for f in fields if f.split_axis is not None and f.name in {"key", "ssm"}]
    return min(split, key=lambda f: f.name, default=None)


def _bar(x: float, y: float, geometry: RankGeometry, colours: list[tuple[float, float, str]]) -> list[str]:
    """Return the outline of the whole axis and the held spans, coloured."""
    field = _widest_field(geometry)
    axis = field.split_axis if field is not None else None
    size = axis.size if axis is not None else 1
    out = [f'<rect x="{x}" y="{y}" width="{BAR}" height="{BAR_HEIGHT}" fill="#f2f2f2" stroke="#bbb"/>']
    for start, stop, colour in colours:
        left, width = x + BAR * start / size, BAR * (stop - start) / size
        out.append(
            f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colour}" stroke="white"/>'
        )
    if axis is not None and size <= 32:
        for part in range(size):
            held = any(start <= part < stop for start, stop, _ in colours)
            place = x + BAR * (part + 0.5) / size
            ink = "white" if held else "#999"
            out.append(
                f'<text x="{place:.1f}" y="{y + 14}" font-size="10" fill="{ink}" text-anchor="middle">{part}</text>'
            )
    return out


def _own_spans(geometry: RankGeometry, colour: str) -> list[tuple[float, float, str]]:
    field = _widest_field(geometry)
    axis = field.split_axis if field is not None else None
    return [(axis.start, axis.stop, colour)] if axis is not None else [(0, 1, colour)]


def _read_spans(found: Survey, consumer: Rank) -> list[tuple[float, float, str]]:
    """Return the consumer's parts, each in the colour of the producer rank that it is read from."""
    from kv_topology._readers import field_class
    from kv_topology._select import choose_pieces

    geometry = found.consumers[consumer]
    field = _widest_field(geometry)
    if field is None:
        ranks = [tp for _, tp in found.plans[consumer].producer_ranks]
        return [(n / len(ranks), (n + 1) / len(ranks), _colour(tp)) for n, tp in enumerate(ranks)]
    group = geometry.groups[0]
    pieces = choose_pieces(field_class(field, group, group), geometry.tp_size, consumer[1], found.run.producer.tp)
    return [(piece.start, piece.stop, _colour(piece.producer)) for piece in pieces]


def draw(found: Survey, *, only: int | None = None) -> str:
    """Return the picture of a survey as an SVG document.

    Args:
        found: All plans.
        only: Draw only this consumer tp rank's reads.
    """
    consumers = [rank for rank in sorted(found.consumers) if only is None or rank[1] == only][:LIMIT]
    producers = sorted(found.producers)[:LIMIT]
    height = TOP + ROW * max(len(consumers), len(producers)) + MARGIN
    right = LEFT + BAR + GAP
    width = right + BAR + LEFT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {STYLE}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="34" font-size="18" font-weight="bold">{escape(_title(found))}</text>',
        f'<text x="{MARGIN}" y="56" fill="#555">{escape(_subtitle(found))}</text>',
        f'<text x="{LEFT}" y="{TOP - 12}" fill="#555">consumer ranks: what each holds</text>',
        f'<text x="{right}" y="{TOP - 12}" fill="#555">producer ranks: what each holds</text>',
    ]
    middle = {rank: TOP + ROW * n + BAR_HEIGHT / 2 for n, rank in enumerate(producers)}
    most = max((found.bytes_from(c, p) for c in consumers for p in found.plans[c].producer_ranks), default=1.0)
    for n, consumer in enumerate(consumers):
        out += _lines(found, consumer, TOP + ROW * n + BAR_HEIGHT / 2, middle, most)
    for n, consumer in enumerate(consumers):
        y = TOP + ROW * n
        out.append(
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{_name(consumer, found.run.consumer.pp)}</text>'
        )
        out += _bar(LEFT, y, found.consumers[consumer], _read_spans(found, consumer))
    for n, producer in enumerate(producers):
        y = TOP + ROW * n
        out.append(f'<text x="{right + BAR + 10}" y="{y + 15}">{_name(producer, found.run.producer.pp)}</text>')
        out += _bar(right, y, found.producers[producer], _own_spans(found.producers[producer], _colour(producer[1])))
    return "\n".join([*out, "</svg>", ""])


def _lines(found: Survey, consumer: Rank, y: float, middle: dict[Rank, float], most: float) -> list[str]:
    plan = found.plans[consumer]
    start, stop = LEFT + BAR + 4, LEFT + BAR + GAP - 4
    bend = (start + stop) / 2
    out: list[str] = []
    for rank in (*plan.producer_ranks, *plan.notify_only_ranks):
        if rank not in middle:
            continue
        is_read = rank in plan.producer_ranks
        width = 1 + 4 * found.bytes_from(consumer, rank) / most if is_read else 1
        style = f'stroke="{_colour(rank[1])}"' if is_read else 'stroke="#888" stroke-dasharray="2 5"'
        path = f"M {start} {y} C {bend} {y}, {bend} {middle[rank]}, {stop} {middle[rank]}"
        out.append(f'<path d="{path}" fill="none" stroke-width="{width:.1f}" opacity="0.8" {style}/>')
    return out


def _name(rank: Rank, stages: int) -> str:
    return f"pp{rank[0]} tp{rank[1]}" if stages > 1 else f"tp{rank[1]}"


def _title(found: Survey) -> str:
    run = found.run
    return (
        f"tp {run.consumer.tp} reads from tp {run.producer.tp}: {len(run.model.kinds)} layers, "
        f"{run.consumer.layout} from {run.producer.layout}"
    )


def _subtitle(found: Survey) -> str:
    field = _widest_field(next(iter(found.consumers.values())))
    axis = field.split_axis if field is not None else None
    what = (
        f"{axis.size} {axis.name}s of {field.name}" if axis is not None and field is not None else "held by every rank"
    )
    return f"bars show {what}; colours say which producer rank a part is read from; dotted lines only notify"
