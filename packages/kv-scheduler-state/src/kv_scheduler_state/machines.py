"""The three machines as data, for diagrams and proofs."""

from kv_scheduler_state._machine import Table, Transition
from kv_scheduler_state._tables import CONSUMER_TABLE, LEASE_TABLE, PRODUCER_TABLE

__all__ = ["CONSUMER_TABLE", "LEASE_TABLE", "PRODUCER_TABLE", "Table", "Transition"]
