"""Models of the engines around this package, an explorer of every order of events, and checks for any implementation.

Free of pytest: a failed check raises `ModelViolation`, which is an `AssertionError`.
"""

from kv_scheduler_state.testing._checks import check_lease_table, check_scheduler_state
from kv_scheduler_state.testing._decode import DecodeSide
from kv_scheduler_state.testing._explore import Exploration, World, decode_world, explore, pair_world, prefill_world
from kv_scheduler_state.testing._fleet import Configuration, random_walk
from kv_scheduler_state.testing._forgeries import forged_tickets, tampered_tickets
from kv_scheduler_state.testing._model import ModelViolation, Step, demand
from kv_scheduler_state.testing._peers import GenerousPeer, Peer
from kv_scheduler_state.testing._prefill import PrefillSide
from kv_scheduler_state.testing._prompt import Tables

__all__ = [
    "Configuration",
    "DecodeSide",
    "Exploration",
    "GenerousPeer",
    "ModelViolation",
    "Peer",
    "PrefillSide",
    "Step",
    "Tables",
    "World",
    "check_lease_table",
    "check_scheduler_state",
    "decode_world",
    "demand",
    "explore",
    "forged_tickets",
    "pair_world",
    "prefill_world",
    "random_walk",
    "tampered_tickets",
]
