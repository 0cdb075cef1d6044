"""Block lists: which of a request's blocks cross between two engines, and which tokens each of them stands for.

A block of a group covers `span_tokens` tokens of the prompt (`block_tokens * dcp`). A list names its blocks in token order and
the token with which it begins, so that no side has to guess where the other side's list begins.

Example: 4 tokens per block, a prompt of 18 tokens, a window of 6 tokens.

- A producer has the blocks 10 11 12 13 14 and one more, 15, that was allocated ahead. 18 tokens need ceil(18 / 4) = 5 blocks, so
  15 is cut off. A window of 6 tokens touches at most ceil(6 / 4) + 1 = 3 blocks: the ticket lists (12, 13, 14), which begin
  with token (5 - 3) * 4 = 8. A group that keeps the whole prompt lists all five blocks from token 0.
- A consumer has a prefix hit of 8 tokens and the blocks 20 21 22 23 24, of which 20 and 21 are the hit. It fills (22, 23, 24),
  which begin with token 8.

The decisions below are the answers of the machines to the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, final

from kv_scheduler_state.errors import InvalidEvent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_scheduler_state.config import GroupConfig

__all__ = [
    "Admission",
    "BYSTANDER",
    "BlockIds",
    "BlockList",
    "BlockRules",
    "FinishDecision",
    "FinishReason",
    "Role",
    "running_state",
]

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids, one tuple per KV-cache group, in token order."""


@final
class BlockList(NamedTuple):
    """Blocks of one KV-cache group, in token order.

    Attributes:
        ids: Block ids.
        first_token: Index in the prompt of the first token that `ids[0]` stands for; 0 for a state, where it means nothing.
        null: The id that stands for "no block here"; None if every id is a block.
    """

    ids: tuple[int, ...]
    first_token: int = 0
    null: int | None = None


@final
class BlockRules:
    """Cuts a request's blocks to those that cross between engines, group by group.

    Args:
        groups: The model's groups.
        null: The engine's id for "no block here", or None.
    """

    def __init__(self, groups: tuple[GroupConfig, ...], null: int | None = None) -> None:
        self._groups = groups
        self._null = null
        self.nothing = tuple([BlockList(()) for _ in groups])

    def require_groups(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Refuse block lists of another model.

        Raises:
            InvalidEvent: `invalid-event`, if the number of groups is not the model's.
        """
        if len(block_ids) != len(self._groups):
            raise InvalidEvent(
                f"block ids come in {len(block_ids)} groups, the model has {len(self._groups)}",
                groups=len(block_ids),
                expected=len(self._groups),
            )

    def offered(self, block_ids: Sequence[Sequence[int]], tokens: int) -> tuple[BlockList, ...]:
        """Return the blocks that a producer offers of its first `tokens` tokens."""
        lists: list[BlockList] = []
        for group, ids in zip(self._groups, block_ids, strict=True):
            if group.kind == "state":
                lists.append(BlockList(running_state(group.scratch_blocks, ids), 0, self._null))
                continue
            end, window = min(len(ids), -(-tokens // group.span_tokens)), group.window_blocks
            first = max(0, end - window) if window else 0
            lists.append(BlockList(tuple(ids[first:end]), first * group.span_tokens, self._null))
        return tuple(lists)

    def wanted(
        self, block_ids: Sequence[Sequence[int]], new_block_ids: Sequence[Sequence[int]], start: int, tokens: int
    ) -> tuple[BlockList, ...]:
        """Return the blocks that a consumer fills with the tokens from `start` up to `tokens`.

        Args:
            block_ids: All blocks of the request.
            new_block_ids: Those that no prefix hit covers; nothing else is ever filled.
            start: Tokens that a prefix hit covers.
            tokens: Tokens that the blocks hold after the read.

        Raises:
            InvalidEvent: `invalid-event`, for another number of groups, a prefix hit that ends inside a block, or fewer blocks
                than the tokens need.
        """
        self.require_groups(block_ids)
        self.require_groups(new_block_ids)
        if not any(new_block_ids):
            return self.nothing
        groups = zip(self._groups, block_ids, new_block_ids, strict=True)
        return tuple([self._filled(*each, start, tokens) for each in groups])

    def _filled(self, group: GroupConfig, ids: Sequence[int], new: Sequence[int], start: int, tokens: int) -> BlockList:
        """Return the blocks of one group that a consumer fills, see `wanted`."""
        if group.kind == "state":
            return BlockList(running_state(group.scratch_blocks, new), 0, self._null)
        span, window = group.span_tokens, group.window_blocks
        first, end = start // span, -(-tokens // span)
        if start % span or len(ids) < end:
            raise InvalidEvent(
                f"a read of tokens {start} to {tokens} needs whole blocks of {span} tokens from the first on, and {end} of "
                f"them; the request has {len(ids)}",
                start=start,
                tokens=tokens,
                span_tokens=span,
                blocks=len(ids),
            )
        if window:
            first = max(first, end - window)
        wanted, null = ids[first:end], self._null
        if wanted != new and not (fillable := frozenset(new)).issuperset(wanted):
            if null is None:
                raise InvalidEvent(
                    f"blocks of a prefix hit lie among those to fill, and this engine has no null block: {wanted}"
                )
            wanted = [block if block in fillable else null for block in wanted]
        return BlockList(tuple(wanted), first * span, null)

    def chunk(self, block_ids: Sequence[Sequence[int]]) -> BlockIds:
        """Return the blocks of one chunk of a prefill that have to be saved: all blocks of a state, since none is final yet.

        Raises:
            InvalidEvent: `invalid-event`, if the number of groups is not the model's.
        """
        self.require_groups(block_ids)
        return tuple([tuple(ids[-group.window_blocks :]) for group, ids in zip(self._groups, block_ids, strict=True)])


def running_state(scratch_blocks: int, ids: Sequence[int]) -> tuple[int, ...]:
    """Return the block with the running state: the last one in front of the scratch blocks.

    Example: `scratch_blocks` 2 and the blocks 1 2 3 4: block 2. Scratch blocks may not be allocated yet, so the running state is
    at least the first block: of 1 2 it is block 1.
    """
    if not ids:
        return ()
    last = len(ids) - 1 - min(scratch_blocks, len(ids) - 1)
    return (ids[last],)


Role = Literal["none", "producer", "consumer"]
FinishReason = Literal["length", "stop", "abort", "error"]


@final
class Admission(NamedTuple):
    """Decision on a request that has just arrived.

    Attributes:
        role: "producer": its blocks will be handed over. "consumer": its prompt will be read. "none": it is the
            engine's own business; the calls for it are accepted and change nothing. A prefill that also reads a
            readback ticket is a "producer".
        rejected_code: Code of the reason why its ticket was refused; empty otherwise. Its prompt is then computed here, except
            after `ticket-media-missing`, see `SchedulerState.must_fail`.
        rejected_message: The same as a sentence.
        truncate_tokens: Trailing prompt tokens to drop, once, before the prefix lookup; the consumer computes them.
        is_early: Whether its prompt may be read while it is computed. A producer's chunks must be reported; a consumer has no
            ticket yet and asks for one.
    """

    role: Role
    rejected_code: str = ""
    rejected_message: str = ""
    truncate_tokens: int = 0
    is_early: bool = False


@final
class FinishDecision(NamedTuple):
    """Decision on a finished request's blocks.

    Attributes:
        keep_blocks: Whether the engine keeps them until the workers report the request as sent.
        params: `kv_transfer_params` of the response, or None for no hand-over.
        withheld_code: Code of the reason why a prompt that ended well is not handed over: `withheld` (the caller asked for
            it), `cache-reset`, `no-blocks`, `draining`, `lease-quota`, `no-fence-slot` or `state-too-long`; empty otherwise.
    """

    keep_blocks: bool
    params: Mapping[str, object] | None
    withheld_code: str = ""


BYSTANDER: Final = Admission("none")
