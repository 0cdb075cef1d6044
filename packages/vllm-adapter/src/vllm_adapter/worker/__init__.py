"""Worker side of the connector: the engine thread's half, and the parts that it drives."""

__all__: list[str] = []
