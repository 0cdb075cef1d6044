"""Plans: which bytes of which producer rank a consumer rank reads."""

__all__: list[str] = []
