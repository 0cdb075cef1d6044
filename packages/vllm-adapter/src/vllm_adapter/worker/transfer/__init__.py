"""The parts that run on the transfer thread only: reads, peers, leases."""

__all__: list[str] = []
