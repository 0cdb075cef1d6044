"""Groups that share memory: no byte may be the target of two groups' blocks in one request.

Hybrid engines hand the same pages to either group, one at a time. Regions whose memory overlaps form a cluster. Clusters of
one shape (those of the first layers of all groups, of the second layers, ...) would all give the same answer, so one of each
shape is kept.

Worked example. Two groups over one memory, pages of 64 bytes: group 0 has 2 pages per block, group 1 has pages of 128
bytes, 1 per block. Local blocks (3) and (3): group 0 writes bytes 384..511 (pages 6 and 7), group 1 writes 384..511 too,
so the request is refused. Blocks (3) and (4) write 384..511 and 512..639 and are fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kv_topology._arrays import count_up, flat_outer_sum
from kv_topology._errors import InvalidBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._lists import Blocks
    from kv_topology._model import RankGeometry

__all__ = ["SharedView", "check_disjoint_groups", "find_aliases"]


class SharedView(NamedTuple):
    """Pages of one group in a cluster of memory that several groups share.

    Attributes:
        offset: First byte of page 0, from the cluster's first byte.
        group: KV-cache group.
        stride: Bytes from page to page.
        page_bytes: Bytes of a page.
        pages_per_block: Pages of a block.
    """

    offset: int
    group: int
    stride: int
    page_bytes: int
    pages_per_block: int


def find_aliases(geometry: RankGeometry) -> tuple[tuple[SharedView, ...], ...]:
    """Return the shapes of the clusters of memory that several groups share, as hybrid engines have them."""
    views: set[tuple[str, int, int, int, SharedView]] = set()
    for region in geometry.regions:
        stop = region.base_address + region.page_stride_bytes * (region.page_count - 1) + region.page_bytes
        for group in {member.group for member in region.members}:
            per_block = geometry.groups[group].pages_per_block
            view = SharedView(0, group, region.page_stride_bytes, region.page_bytes, per_block)
            views.add((region.memory_kind, region.device, region.base_address, stop, view))
    shapes: set[tuple[SharedView, ...]] = set()
    cluster: list[SharedView] = []
    origin, end = ("", 0, 0), 0
    for kind, device, base, stop, view in [*sorted(views), ("", -1, 0, 0, SharedView(0, 0, 0, 0, 0))]:
        if (kind, device) != origin[:2] or base >= end:
            if len({member.group for member in cluster}) > 1:
                shapes.add(tuple(cluster))
            cluster, origin, end = [], (kind, device, base), stop
        cluster.append(view._replace(offset=base - origin[2]))
        end = max(end, stop)
    return tuple(sorted(shapes))


def check_disjoint_groups(aliases: Sequence[Sequence[SharedView]], local: Sequence[Blocks]) -> None:
    """Raise `InvalidBlocks` (`local-block-twice`) if two groups that share memory are to be written in one place.

    Args:
        aliases: From `find_aliases`.
        local: Local blocks per group; null blocks are never written.
    """
    for cluster in aliases:
        used = [view for view in cluster if len(local[view.group].ids)]
        if len({view.group for view in used}) >= 2:
            _check_disjoint_pages(used, [_page_starts(view, local[view.group]) for view in used])


def _check_disjoint_pages(views: Sequence[SharedView], page_starts: Sequence[np.ndarray]) -> None:
    """Raise unless no page of a request begins within another one of the same cluster.

    Example: the pages 384..447 and 448..511 of one group beside 384..511 of another: sorted by their starts, the first
    stops at 448, beyond the start 384 of the second, so the two groups are refused.
    """
    counts = [len(starts) for starts in page_starts]
    starts = np.concatenate(page_starts)
    stops = starts + np.repeat([view.page_bytes for view in views], counts)
    order = np.argsort(starts)
    touching = np.flatnonzero(starts[order][1:] < stops[order][:-1])
    if len(touching):
        owner = np.repeat([view.group for view in views], counts)[order]
        groups = sorted({int(owner[touching[0]]), int(owner[touching[0] + 1])})
        raise InvalidBlocks(
            f"Groups {groups} share memory, and their local block lists both name the page at byte "
            f"{int(starts[order][touching[0] + 1])}; a block belongs to one group at a time.",
            code="local-block-twice",
            context={"groups": tuple(groups)},
        )


def _page_starts(view: SharedView, blocks: Blocks) -> np.ndarray:
    """Return the first bytes of the pages of real blocks, from the cluster's first byte."""
    ids = blocks.ids[blocks.ids != blocks.null] if blocks.has_null else blocks.ids
    pages = flat_outer_sum(ids * view.pages_per_block, count_up(view.pages_per_block))
    return pages * view.stride + view.offset
