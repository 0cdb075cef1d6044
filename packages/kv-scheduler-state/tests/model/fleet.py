"""A producer and several consumers with block pools and memory, driven at random under a random configuration.

This model draws at random the settings that the exhaustive models fix: kinds of groups, fence slots that run out, processes that
stand still, several consumers and siblings per ticket, request ids that come again, revocations, blocks that were only
allocated ahead. The truth is kept beside the code under test: the content of every block, and the readers that really reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state.errors import SchedulerStateError
from model.promises import ModelViolation

from .fleet_consumer import FleetConsumer
from .fleet_producer import FleetProducer
from .fleet_shared import Configuration, Shared

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Configuration", "random_walk"]

_STOP_S: Final = 60.0
_HEAL_ROUNDS: Final = 400


@final
class Fleet:
    """A producer and its consumers; `below(n)` draws an integer from 0 to n - 1."""

    def __init__(self, below: Callable[[int], int]) -> None:
        self.shared = shared = Shared(below)
        self.producer = FleetProducer(shared)
        self.consumers = [FleetConsumer(number, shared) for number in range(shared.config.consumers)]

    def round(self) -> None:
        """Let something happen in every part of the fleet."""
        shared = self.shared
        if shared.is_healing or shared.below(2):
            shared.now_s += shared.config.lease_s / 12
        if not shared.is_healing and not shared.below(40):
            self._stand_still()
        self.producer.round()
        for consumer in self.consumers:
            consumer.round()
            consumer.check()
        self.producer.turns()
        self.producer.check()

    def _stand_still(self) -> None:
        """Stop all workers for a minute; heartbeats go on and wait in their queues, and timers run before they are read."""
        until_s = self.shared.now_s + _STOP_S
        while self.shared.now_s < until_s:
            self.shared.now_s += self.shared.config.lease_s / 12
            for consumer in self.consumers:
                consumer.order_reads()

    def heal(self) -> None:
        """Go on without faults until nothing is left.

        Raises:
            ModelViolation: if something is left.
        """
        self.shared.is_healing = True
        for _ in range(_HEAL_ROUNDS):
            self.round()
            if self.producer.is_settled() and all(consumer.is_settled() for consumer in self.consumers):
                return
        raise ModelViolation(f"something never ends: {self.producer.state.snapshot(now_s=self.shared.now_s)}")


def random_walk(below: Callable[[int], int], *, rounds: int) -> Configuration:
    """Drive a fleet of a random configuration for some rounds, heal it, and return the configuration.

    Args:
        below: Draws an integer from 0 to its argument minus one, such as `random.Random(seed).randrange`.
        rounds: Rounds before the fleet heals.

    Raises:
        ModelViolation: if the code under test breaks a promise, or refuses a lawful call.
    """
    fleet = Fleet(below)
    try:
        for _ in range(rounds):
            fleet.round()
        fleet.heal()
    except SchedulerStateError as error:
        raise ModelViolation(f"a lawful call was refused: {error}") from error
    return fleet.shared.config
