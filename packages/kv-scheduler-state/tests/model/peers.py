"""The other engine as a decode engine meets it, and its knowledge of one request."""

from __future__ import annotations


class GenerousPeer:
    """A peer that has every prompt and keeps it for ever."""

    def __init__(self, readers: int) -> None:
        self.readers = tuple(f"reader-{rank}" for rank in range(readers))

    def ticket(self, request_id: str) -> dict[str, object] | None:
        """Return a ticket with three blocks."""
        return {
            "do_remote_prefill": True,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": "prefill-0",
            "remote_request_id": request_id,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "kv_fence": [0, 7],  # without one, any end that it is told of would use the ticket up
        }

    def notify(self, request_id: str, reader: str, now_s: float) -> None:
        """Ignore it."""

    def renew(self, request_id: str, now_s: float) -> None:
        """Ignore it."""

    def is_fence_intact(self, request_id: str) -> bool:
        """Return True."""
        return bool(request_id)

    def is_freed(self, request_id: str) -> bool:
        """Return False."""
        return not request_id


class Answer:
    """The engine's and the observer's knowledge of one request."""

    def __init__(self, readers: int) -> None:
        self.status = "absent"
        self.preemptions = 0
        self.orders = 0
        self.is_notified = False
        # Whether its read has used the ticket up, or will pass it on when it is quiet.
        self.is_over = False
        # Whether its read has ended well, so that no other request reads the ticket any more.
        self.is_read = False
        self.is_passed = False
        # Whether no other request wanted the hand-over when this request gave it up.
        self.may_tell = True
        self.ranks = ["idle"] * readers
        self.in_flight: frozenset[int] = frozenset()
        self.beaten_s: float | None = None
