"""A producer's worker: leases, and the fence words of announced requests."""

__all__: list[str] = []
