"""The first token of each block list in a ticket.

Tickets of this project carry it (`kv_first_tokens`). vLLM's own connector, and version 0.1 of this project, only send ids, under
fixed rules: a group that keeps the whole prompt is sent whole; a window group is cut to its last `window_blocks` blocks;
of a state group the running state is sent, by older versions with the scratch blocks behind it. A list as long as a whole
list beside it was not cut and begins with token 0. The first token of a cut one follows from the whole list and from the size of
the peer's blocks, which such a ticket does not tell. So blocks of our size must make lists of just these lengths from the tokens
that the peer has computed; the worker, which learns the true size at the handshake, refuses the ticket if it is another one after
all. The same holds for a list with null blocks at its front.

Example: blocks of 16 tokens, a window of 32 (`window_blocks` 3). A ticket of 160 tokens with a whole list of 10 blocks and a
window list of 3: it begins with token (10 - 3) * 16 = 112. A peer with blocks of 32 lists 5 and 2 for the same tokens; its window
list begins with token 96, but 5 is not 160 / 16, so the ticket is refused. With no whole list beside it a list is refused, too,
unless the window covers all tokens: counting from the end of the prompt would be a guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, final

from kv_scheduler_state.errors import TicketError, quote
from kv_scheduler_state.values import BlockList, running_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_scheduler_state.config import GroupConfig
    from kv_scheduler_state.ticket.ticket import PeerAddress
    from kv_scheduler_state.values import BlockIds

__all__ = ["PeerBlocks"]

_MAX_TOKENS = 1 << 31
_MAX_BLOCK = (1 << 32) - 1


@final
class PeerBlocks:
    """Makes block lists of a ticket's ids.

    Args:
        groups: The local model's groups, which the peer's match in kind.
        null: The local engine's null block; vLLM's own peers use the same.
    """

    def __init__(self, groups: tuple[GroupConfig, ...], null: int | None) -> None:
        self._groups = groups
        self._null = null

    def lists(
        self, fields: Mapping[object, object], ids: BlockIds, peer: PeerAddress, tokens: int | None
    ) -> tuple[BlockList, ...]:
        """Return one block list per group.

        Args:
            fields: The ticket.
            ids: Its block ids, checked, as many lists as there are groups.
            peer: The engine that wrote the ticket.
            tokens: Tokens that it has computed, None if the ticket does not say.

        Raises:
            TicketError: `ticket-first-token`, `ticket-blocks`, `ticket-type`.
        """
        first = self._integers(fields, "kv_first_tokens", 0)
        is_cut = first is not None
        if first is None:
            first = [self._first_token(number, ids, peer.dcp, tokens) for number in range(len(ids))]
            null = self._null
        else:
            null = _null_block(fields.get("kv_null_block"))
        return tuple(
            [
                BlockList(_state(group, group_ids, is_cut=is_cut) if group.kind == "state" else group_ids, at, null)
                for group, group_ids, at in zip(self._groups, ids, first, strict=True)
            ]
        )

    def spans(self, fields: Mapping[object, object]) -> tuple[int, ...]:
        """Return the tokens per block of each group, empty if the ticket does not say.

        Raises:
            TicketError: `ticket-type` or `ticket-first-token`.
        """
        return tuple(self._integers(fields, "kv_span_tokens", 1) or ())

    def _first_token(self, number: int, ids: BlockIds, dcp: int, tokens: int | None) -> int:
        group, own = self._groups[number], ids[number]
        count = len(own)
        if not group.sees_a_part or not count:
            return 0
        whole = next(
            (
                len(other_ids)
                for other, other_ids in zip(self._groups, ids, strict=True)
                if other.kind == "full" and other.block_tokens == group.block_tokens
            ),
            None,
        )
        if own[0] != self._null:
            is_short = tokens is not None and tokens <= group.window_tokens
            if count == whole or (whole is None and is_short):
                return 0
        if whole is not None and tokens is not None and _may_be_our_blocks(group, dcp, tokens, whole, count):
            return (whole - count) * group.block_tokens * dcp
        raise TicketError(
            "ticket-first-token",
            f"remote_block_ids lists {count} blocks for the window group {number}, and nothing says where in the prompt they "
            f"begin: the ticket has no kv_first_tokens, and blocks of {group.block_tokens} tokens do not make these of its "
            f"{tokens} tokens, with {whole} blocks of a whole group",
            field="remote_block_ids",
            group=number,
        )

    def _integers(self, fields: Mapping[object, object], name: str, least: int) -> list[int] | None:
        value = fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise TicketError("ticket-type", f"{name} is {quote(value)}; it must be a list of integers", field=name)
        numbers = cast("list[int]", value)
        is_good = len(numbers) == len(self._groups) and all(
            type(number) is int and least <= number <= _MAX_TOKENS for number in numbers
        )
        if not is_good:
            raise TicketError(
                "ticket-first-token",
                f"{name} must hold one integer from {least} to {_MAX_TOKENS} for each of {len(self._groups)} groups",
                field=name,
            )
        return list(numbers)


def _may_be_our_blocks(group: GroupConfig, dcp: int, tokens: int, whole: int, count: int) -> bool:
    """Return whether blocks of our size make these lists of so many tokens.

    Example: 250 tokens, a window of 64, blocks of 64: a whole list of 4 and a window list of 2. Blocks of 80 make the same two.

    Args:
        group: The group with a window, or chunks, which vLLM does not cut.
        dcp: Context ranks that share a block of the peer's.
        tokens: Tokens that the peer has computed.
        whole: Blocks in its whole list.
        count: Blocks in its list of this group.
    """
    span = group.block_tokens * dcp
    kept = -(-group.window_tokens // span) + 1 if group.window_tokens else whole
    return whole == -(-tokens // span) and count == min(whole, kept)


def _null_block(value: object) -> int | None:
    if value is None or (type(value) is int and 0 <= value <= _MAX_BLOCK):
        return value
    raise TicketError("ticket-blocks", f"kv_null_block is {quote(value)}, must be a block id", field="kv_null_block")


def _state(group: GroupConfig, ids: tuple[int, ...], *, is_cut: bool) -> tuple[int, ...]:
    """Return the one block that holds a state.

    Raises:
        TicketError: `ticket-blocks`, for several blocks in a ticket whose writer sends the running state alone.
    """
    if len(ids) > 1 and is_cut:
        raise TicketError(
            "ticket-blocks",
            f"remote_block_ids lists {len(ids)} blocks for a state group, which has one running state",
            field="remote_block_ids",
        )
    return running_state(group.scratch_blocks, ids)
