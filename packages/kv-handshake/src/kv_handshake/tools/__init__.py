"""The command line, and what it prints and compares."""

__all__: list[str] = []
