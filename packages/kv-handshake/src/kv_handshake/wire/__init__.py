"""Bytes and values: no sockets and no clock."""

__all__: list[str] = []
