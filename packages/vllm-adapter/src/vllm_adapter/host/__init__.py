"""The host's side of the adapter: the only room that imports vLLM or torch."""

__all__: list[str] = []
