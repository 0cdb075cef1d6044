"""The seam to NIXL and UCX."""

__all__: list[str] = []
