"""The connector in a worker's process: the engine thread's half, and what it drives."""

__all__: list[str] = []
