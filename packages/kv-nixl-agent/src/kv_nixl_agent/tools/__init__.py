"""The command `kv-nixl` and its doctor."""

__all__: list[str] = []
