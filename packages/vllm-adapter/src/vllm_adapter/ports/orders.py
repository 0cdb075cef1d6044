"""Orders of hand-overs: plain values that the request machines send to the workers in a `StepPlan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["BlockList", "FenceOrder", "GrantOrder", "HeartbeatOrder", "PeerAddress", "ReadOrder"]


class BlockList(Protocol):
    """Blocks of one KV-cache group, in token order.

    A block covers `block_tokens * dcp` tokens. Example: 4 tokens per block, a prefix hit of 8 tokens, `ids=(5, 6)`,
    `first_token=8`: block 5 holds tokens 8 to 11 and block 6 holds tokens 12 to 15.
    """

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def first_token(self) -> int:
        """Index in the prompt of the first token of `ids[0]`; 0 for a state, where it has no meaning."""
        ...

    @property
    def null(self) -> int | None:
        """The id that stands for "no block here"; None if every id is a block."""
        ...


class PeerAddress(Protocol):
    """The peer engine of an order, as its ticket names it."""

    @property
    def engine_id(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def dcp(self) -> int: ...
    @property
    def generation(self) -> int | None:
        """Generation of the peer's memory registration that the ticket was written under, or None."""
        ...

    @property
    def dialect(self) -> int | None:
        """Connector version that the peer's ticket announced, or None."""
        ...


class ReadOrder(Protocol):
    """A request's read, or the notification that replaces it."""

    @property
    def request_id(self) -> str: ...
    @property
    def peer(self) -> PeerAddress: ...
    @property
    def peer_request_id(self) -> str: ...
    @property
    def peer_blocks(self) -> Sequence[BlockList]: ...
    @property
    def local_blocks(self) -> Sequence[BlockList]:
        """Blocks to fill; all without ids for a notify-only order (full prefix hit, or aborted before allocation)."""
        ...

    @property
    def tokens(self) -> int:
        """Prompt tokens that the local KV covers after the read: the end (exclusive) of the ordered range."""
        ...

    @property
    def fence(self) -> tuple[int, int] | None:
        """(slot, generation) to verify after the read."""
        ...

    @property
    def nonce(self) -> str:
        """Nonce of the grant, to return in every notification; empty if the peer gave none."""
        ...

    @property
    def lease_s(self) -> float | None: ...
    @property
    def is_reported(self) -> bool:
        """Whether the scheduler waits for the end of this order."""
        ...

    @property
    def prompt(self) -> str:
        """Digest of the prompt in the ticket, already verified; empty if the ticket has none."""
        ...

    @property
    def is_notify_only(self) -> bool: ...


class HeartbeatOrder(Protocol):
    """Leases at one peer engine to renew now."""

    @property
    def peer(self) -> PeerAddress: ...
    @property
    def readers(self) -> Sequence[tuple[str, str]]:
        """(peer request id, nonce) pairs."""
        ...


class FenceOrder(Protocol):
    """A fence word to write before the request's blocks can be read."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...


class GrantOrder(Protocol):
    """A lease that starts now, on the worker's clock."""

    @property
    def request_id(self) -> str: ...
    @property
    def lease_s(self) -> float: ...
    @property
    def fence(self) -> tuple[int, int] | None: ...
    @property
    def nonce(self) -> str: ...
