"""Asks, by which engines hand a prompt over while it is computed."""

__all__: list[str] = []
