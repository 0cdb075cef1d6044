"""Reads, peers and leases of one registration: everything that runs in turns of the transfer thread."""

__all__: list[str] = []
