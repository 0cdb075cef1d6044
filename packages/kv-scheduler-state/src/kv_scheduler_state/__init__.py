"""The life of a hand-off as state machines: tickets, leases, heartbeats, step plans."""

__version__ = "0.1.0"
