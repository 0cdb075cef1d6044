"""The ticket of a hand-over: its value, how it is read, sealed and bound to a prompt."""

__all__: list[str] = []
