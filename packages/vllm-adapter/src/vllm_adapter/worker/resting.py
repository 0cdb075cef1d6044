"""The wait of a rank in steps that compute nothing; without it, the host takes a thousand such steps a second."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from vllm_adapter.steps import StepOrders

__all__ = ["Resting"]


@final
class Resting:
    """Waits until this rank has an end to report. Engine thread only, except `wake`.

    Args:
        stages: Pipeline stages of the engine.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._has_ended = threading.Event()
        self._rest_s = 0.0
        self._is_asking = False
        # Steps that the host may still have built before it took in the latest report.
        self._steps_ahead = 0
        self._leases: set[str] = set()

    def begin(self, orders: StepOrders) -> None:
        """Take in a step's orders."""
        self._rest_s, self._is_asking = orders.rest_s, orders.is_asking
        self._leases.update(grant.request_id for grant in orders.plan.grants)

    def wake(self) -> None:
        """End the wait: something has ended; any thread."""
        self._has_ended.set()

    def wait(self, *, is_reading: bool) -> None:
        """Wait as long as this step may, unless a report is on its way or this rank waits for nothing itself.

        Other ranks may still wait: the step lasts until all have reported, so this one must not delay theirs.
        """
        rest_s, self._rest_s = self._rest_s, 0.0
        if self._steps_ahead:
            self._steps_ahead -= 1
        elif rest_s and (is_reading or self._leases or self._is_asking):
            self._has_ended.wait(rest_s)
        self._has_ended.clear()

    def reported(self, sent: AbstractSet[str]) -> None:
        """Note a report, with the requests whose lease has ended.

        The host has at most one batch more in flight than there are stages. It takes the report in after it has built the
        steps behind this one, so a wait in one of them would delay the report.
        """
        self._steps_ahead = self._stages
        self._leases -= sent
