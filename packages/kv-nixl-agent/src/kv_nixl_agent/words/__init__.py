"""Words that peers read one-sidedly."""

__all__: list[str] = []
