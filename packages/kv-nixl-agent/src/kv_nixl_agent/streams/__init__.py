"""Words and polls of prompts that are read while they are computed."""

__all__: list[str] = []
