"""The order to read a prompt from a peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from kv_scheduler_state._blocks import BlockList
    from kv_scheduler_state._ticket import PeerAddress

__all__ = ["ReadOrder"]


@final
class ReadOrder(NamedTuple):
    """A request's read, or the notification that stands in for it.

    Attributes:
        request_id: The local request.
        peer: Engine to read from.
        peer_request_id: The request's id there; notifications carry this one.
        peer_blocks: Blocks that the peer offers, per group.
        local_blocks: Blocks to fill, per group. All without ids: nothing to read, only notify the peer.
        tokens: Prompt tokens that the local KV holds after the read; blocks beyond are not filled.
        fence: (slot, generation) to verify after the read, or None if the peer has no fences.
        nonce: Nonce of the grant, to send back in every notification; empty if the ticket has none.
        lease_s: Lease that the ticket announced, or None.
        is_reported: Whether the engine waits for the end of this order. True even without blocks, if the engine parked
            the request before it was aborted.
        prompt: Digest of the prompt in the ticket, already verified; empty if the ticket has none.
    """

    request_id: str
    peer: PeerAddress
    peer_request_id: str
    peer_blocks: tuple[BlockList, ...]
    local_blocks: tuple[BlockList, ...]
    tokens: int
    fence: tuple[int, int] | None
    nonce: str
    lease_s: float | None
    is_reported: bool
    prompt: str = ""

    @property
    def is_notify_only(self) -> bool:
        """Whether there is nothing to read."""
        return not any(blocks.ids for blocks in self.local_blocks)
