"""This engine's KV cache as values: facts, fields of a page, geometry documents, envelopes."""

__all__: list[str] = []
