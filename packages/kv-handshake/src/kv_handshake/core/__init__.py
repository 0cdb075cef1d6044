"""The protocol of both ends without sockets and threads."""

__all__: list[str] = []
