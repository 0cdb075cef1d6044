"""The client and the listener: threads over sockets."""

__all__: list[str] = []
