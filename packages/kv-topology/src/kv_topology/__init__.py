"""Which bytes of which peer rank land where: layouts, shards and transfer plans for paged KV caches."""

__version__ = "0.1.0"
