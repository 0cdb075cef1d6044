"""Layouts by name, and regions that hold them, for tests."""

from dataclasses import replace
from typing import NamedTuple

from kv_topology import Group, Member, RankGeometry, Region
from kv_topology.tools.engine import attention_layouts


class AttentionShape(NamedTuple):
    """Numbers of an attention layer and of the rank that holds a share of it."""

    kv_heads: int
    head_dim: int
    page_tokens: int
    element_bytes: int = 2
    tp_size: int = 1
    tp_rank: int = 0


def packed_layout(shape, order="HND"):
    return attention_layouts(f"packed-{order}", *shape)[0]


def halves_layout(shape, order="HND"):
    return attention_layouts(f"halves-{order}", *shape)[0]


def split_layouts(shape, order="HND"):
    return attention_layouts(f"split-{order}", *shape)


def layer_regions(layers, layout, *, base_address, page_count):
    """Return one region per layer, one after the other in memory."""
    page = layout.extent_bytes
    return [
        Region(base_address + number * page * page_count, page, page, page_count, (Member(layer, layout, 0),))
        for number, layer in enumerate(layers)
    ]


def rank_geometry(groups: list[Group], regions, *, tp_size=1, tp_rank=0):
    """Return the geometry of a rank without pipeline stages, its groups' context ranks set from `tp_rank`."""
    dealt = [replace(group, deal=replace(group.deal, rank=tp_rank % group.deal.size)) for group in groups]
    return RankGeometry(tp_size, tp_rank, tuple(dealt), tuple(regions))
