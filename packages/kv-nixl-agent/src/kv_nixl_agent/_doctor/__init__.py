"""The doctor: findings about this machine, and reads between real processes."""

__all__: list[str] = []
