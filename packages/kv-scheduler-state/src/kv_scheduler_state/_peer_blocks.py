"""The first token of each block list in a ticket.

Tickets of this project carry it (`kv_first_tokens`). vLLM's own connector, and version 0.1 of this project, only send ids, under
fixed rules: a group that keeps the whole prompt is sent whole; a window group is cut to its last `window_blocks` blocks;
of a state group the running state is sent, by older versions with the scratch blocks behind it. The first token of a cut
window list follows from a whole list with blocks of the same size, which has as many blocks as the window list had before
the cut.

Example: blocks of 16 tokens, a window of 32 (`window_blocks` 3), a whole list of 10 blocks and a window list of 3: the window
list begins with token (10 - 3) * 16 = 112, whether the last block holds tokens of the prompt or was only allocated ahead. A
window list of 2 blocks was never cut and begins with token 0. With no whole list beside it a cut list is refused: counting
from the end of the prompt would be a guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, final

from kv_scheduler_state._blocks import BlockList, new_tuple, running_state
from kv_scheduler_state._errors import TicketError, quote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_scheduler_state._blocks import BlockIds
    from kv_scheduler_state._config import GroupConfig
    from kv_scheduler_state._ticket import PeerAddress

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

    __slots__ = ("_groups", "_is_whole", "_null")

    def __init__(self, groups: tuple[GroupConfig, ...], null: int | None) -> None:
        self._groups = groups
        self._null = null
        self._is_whole = all(group.kind == "full" for group in groups)

    def lists(self, fields: Mapping[object, object], ids: BlockIds, peer: PeerAddress) -> tuple[BlockList, ...]:
        """Return one block list per group.

        Args:
            fields: The ticket.
            ids: Its block ids, checked, as many lists as there are groups.
            peer: The engine that wrote the ticket.

        Raises:
            TicketError: `ticket-first-token`, `ticket-blocks`, `ticket-type`.
        """
        told = None if fields.get("kv_first_tokens") is None else self._integers(fields, "kv_first_tokens", 0)
        if told is None:
            if self._is_whole:
                null = self._null
                if len(ids) == 1:
                    return (new_tuple(BlockList, (ids[0], 0, null)),)
                return tuple([new_tuple(BlockList, (group, 0, null)) for group in ids])
            first = [self._first_token(number, ids, peer.dcp) for number in range(len(ids))]
            null = self._null
        else:
            first, null = told, _null_block(fields.get("kv_null_block"))
        is_cut = told is not None
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

    def _first_token(self, number: int, ids: BlockIds, dcp: int) -> int:
        group, count = self._groups[number], len(ids[number])
        if group.kind != "window" or count < group.window_blocks:
            return 0
        span = group.block_tokens * dcp
        for other, other_ids in zip(self._groups, ids, strict=True):
            if other.kind == "full" and other.block_tokens * dcp == span and len(other_ids) >= count:
                return (len(other_ids) - count) * span
        raise TicketError(
            "ticket-first-token",
            f"remote_block_ids lists {count} blocks for the window group {number}, and nothing says where in the prompt they "
            "begin: the ticket has no kv_first_tokens and no whole group with blocks of the same size",
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
