"""The scheduler process: requests, their records, and the orders of each step."""

__all__: list[str] = []
