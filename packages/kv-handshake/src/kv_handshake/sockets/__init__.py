"""The only subpackage that knows ZeroMQ: a listening socket, client connections and a poll over them, and CURVE keys."""

__all__: list[str] = []
