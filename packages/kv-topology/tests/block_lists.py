"""Block lists for tests, short to write."""

from kv_topology import BlockList


def lists(*groups, first=0, null=None):
    """Return a block list per group of ids, all from the same first token."""
    return [BlockList(ids, first, null) for ids in groups]
