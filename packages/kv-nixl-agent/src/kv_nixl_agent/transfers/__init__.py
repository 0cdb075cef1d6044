"""Orders on their way: parts, queue, states, and handles that outlive their transfer."""

__all__: list[str] = []
