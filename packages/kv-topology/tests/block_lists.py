"""Block lists for tests, short to write, and the pairs that come of two of them."""

from typing import Any

from byte_oracle import expand_rows

from kv_topology import BlockList, Group, TokenDeal
from kv_topology.arithmetic import common_unit_tokens
from kv_topology.plan.blocks import ListRules, pair_blocks, read_lists
from kv_topology.plan.boxes import Pairing


def lists(*groups, first=0, null=None):
    """Return a block list per group of ids, all from the same first token."""
    return [BlockList(ids, first, null) for ids in groups]


def bytes_moved(plan, local, peer, *, tokens):
    """Return the bytes that a request moves into this rank from all producer ranks."""
    route = plan.route(local, peer, tokens=tokens)
    return sum(int(expand_rows(plan.local_rows(rank))[to, 1].sum()) for rank, (to, _) in route.indices.items())


def pairing(block, peer_block, pages=1, peer_pages=1, window=0, deal=None, peer_deal=None):
    kind: Any = "sliding-window" if window else "attention"
    mine = Group(kind, block, pages, window, deal or TokenDeal())
    theirs = Group(kind, peer_block, peer_pages, window, peer_deal or TokenDeal())
    unit = common_unit_tokens(mine.page_tokens, theirs.page_tokens, mine.deal, theirs.deal)
    return Pairing(0, 0, mine, theirs, unit, mine.page_tokens // unit, theirs.page_tokens // unit)


def read(group, blocks, side="local", count=1 << 20):
    """Return a checked list, blocks without a limit."""
    return read_lists([blocks], ListRules(side, (group,), (count,), None))[0]


def pairs(pair, local, peer, firsts=(0, 0), nulls=(None, None), tokens=10_000, count=1 << 20):
    """Pairs of two lists that begin at the given places of the sequence, counted in blocks."""
    mine, theirs = pair.local, pair.peer
    near = read(mine, BlockList(local, firsts[0] * mine.span_tokens, nulls[0]), count=count)
    far = read(theirs, BlockList(peer, firsts[1] * theirs.span_tokens, nulls[1]), "peer", count)
    found = pair_blocks(pair, near, far, tokens)
    near, far = (
        divmod(side, units) for side, units in ((found.local, pair.local_units), (found.peer, pair.peer_units))
    )
    return list(zip(*(column.tolist() for column in (*near, *far)), strict=True))
