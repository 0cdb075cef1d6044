"""Reads, peers and leases of one registration: everything that runs on the transfer thread."""

__all__: list[str] = []
