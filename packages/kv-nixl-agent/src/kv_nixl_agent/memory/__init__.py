"""Registered memory, strided rows and peers."""

__all__: list[str] = []
