"""Places of a prompt's block ids in the table of a stream.

Both sides compute them from the number of tokens and the tokens per block alone. The groups follow one another, each with a
place for every block that its tokens need; a group of states has one place.

Worked example. 100 tokens, two groups with blocks of 16 and of 32 tokens, and a group of states: 7 + 4 + 1 = 12 places; the
groups begin with the places 0, 7 and 11. A first chunk of 64 tokens brings the blocks (5, 6, 7, 8) and (20, 21): the runs
(0, (5, 6, 7, 8)) and (7, (20, 21)). The second brings (9, 10, 11, 12), of which 12 was allocated ahead, and (22, 23), and
its state lies in block 30: the runs (4, (9, 10, 11)), (9, (22, 23)) and (11, (30,)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state._blocks import running_state
from kv_scheduler_state._plan import StreamRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._config import GroupConfig

__all__ = ["StreamPlaces"]


@final
class StreamPlaces:
    """Places of one prompt, and how many of each group are filled.

    Args:
        groups: The model's groups.
        tokens: Tokens of the prompt that are handed over.
    """

    __slots__ = ("_counts", "_filled", "_groups", "_starts", "_states", "total")

    def __init__(self, groups: tuple[GroupConfig, ...], tokens: int) -> None:
        self._groups = groups
        self._counts = [1 if group.kind == "state" else -(-tokens // group.span_tokens) for group in groups]
        self._starts = [sum(self._counts[:number]) for number in range(len(groups))]
        self.total = sum(self._counts)
        self._filled = [0] * len(groups)
        # Ids of state groups so far; only the last chunk tells which of them holds the running state.
        self._states: list[list[int]] = [[] for _ in groups]

    def restart(self) -> None:
        """Fill the places from the first one again."""
        self._filled = [0] * len(self._groups)
        self._states = [[] for _ in self._groups]

    def fill(self, block_ids: Sequence[Sequence[int]], *, is_last: bool) -> tuple[StreamRun, ...]:
        """Return the runs of a chunk's new blocks per group."""
        runs: list[StreamRun] = []
        for number, (group, ids) in enumerate(zip(self._groups, block_ids, strict=True)):
            if group.kind == "state":
                self._states[number] += ids
                found = running_state(group.scratch_blocks, self._states[number]) if is_last else ()
                if found:
                    runs.append(StreamRun(self._starts[number], found))
                continue
            filled = self._filled[number]
            kept = tuple(ids[: self._counts[number] - filled])
            if kept:
                runs.append(StreamRun(self._starts[number] + filled, kept))
                self._filled[number] = filled + len(kept)
        return tuple(runs)
