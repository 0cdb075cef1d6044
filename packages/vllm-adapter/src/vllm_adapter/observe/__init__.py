"""Statistics, spans and trace links."""

__all__: list[str] = []
