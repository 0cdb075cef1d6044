"""A transfer as seen by its schedule and by the owner of its handles, which need none of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections import deque

    from ._parts import Part
    from ._peer import Peer
    from ._values import TransferOrder

__all__ = ["Ongoing", "OngoingT"]


class Ongoing(Protocol):
    """Order of a transfer, its peer, and its parts that wait or are on the wire."""

    order: TransferOrder
    peer: Peer
    pending: deque[Part]
    active: list[Part]
    deadline_s: float

    @property
    def has_ended(self) -> bool:
        """Whether its result has been reported."""
        ...


OngoingT = TypeVar("OngoingT", bound=Ongoing)
