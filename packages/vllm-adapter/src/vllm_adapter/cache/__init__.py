"""This engine's KV cache as plain values: facts, fields of a page, geometry documents, envelopes."""

__all__: list[str] = []
