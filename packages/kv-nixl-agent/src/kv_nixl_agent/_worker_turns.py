"""Turns for UCX's worker threads, so that they complete connections and notice those that have ended.

A worker thread of NIXL's UCX backend makes progress only while it carries a part of a transfer, and only transfers of many
descriptors are shared among the threads. If an agent makes only small reads, two things remain undone (NIXL 1.5, four threads):

- **Half-made connections.** Each thread connects to each new peer; the peer's answers stay in sockets that no thread reads, and
  NIXL's progress thread *at the peer* waits for them without sleeping. It took a whole core at 4 of 20 producers whose reader
  had read four pages, and at 7 of 24 of which 32 MB had been read three times. Six turns, 10 ms apart, ended it at 24 of 24;
  two or four turns did not. So twelve turns follow a new peer, and then some at growing intervals, for peers slow to answer.
- **Sockets of lost peers.** 4 for each, 8 over TCP, would stay in CLOSE_WAIT for ever; after a turn none do.

A turn is a read of this agent from itself, of so many descriptors that each thread usually gets a part. Its end is not waited
for, except briefly on close: an agent must not be destroyed while its threads copy. Without worker threads there are no turns.

Example: 4 threads and parts of 128 descriptors: 512 descriptors of 8 bytes, in 16 KB of memory of its own.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._nixl_api import NixlAgent

__all__ = ["WorkerTurns"]

_PLUGIN: Final = "UCX"
_PIECE_BYTES: Final = 8
_GAP_PIECES: Final = 2
"""Adjacent pieces would be merged into one descriptor."""
_PLUGINS_SPLIT: Final = 1024
_END_WAIT_S: Final = 0.5
_LOOK_EVERY_S: Final = 0.001
_GAP_S: Final = 0.05
_EVEN_TURNS: Final = 12
_TURNS: Final = 20
"""Turns after a new peer: twelve at even gaps, eight at gaps that double up to 12.8 s; 26 s in all."""


@final
class WorkerTurns:
    """Lets an agent's worker threads take a turn; does nothing if it has none, or if NIXL cannot read from itself."""

    __slots__ = ("_agent", "_clock", "_left", "_memory", "_name", "_next_s", "_pieces", "_transfer")

    def __init__(
        self, agent: NixlAgent, name: str, parameters: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Store the parameters of turns; nothing is registered before the first turn.

        Args:
            agent: The agent, with its backends.
            name: Name of the agent.
            parameters: Parameters of its UCX backend, in NIXL's spelling.
            clock: Monotonic clock, in seconds.
        """
        threads = int(parameters.get("num_threads", "0"))
        self._agent: NixlAgent | None = agent if threads else None
        self._name = name
        self._pieces = threads * int(parameters.get("split_batch_size", _PLUGINS_SPLIT))
        self._memory: object = None
        self._transfer: object = None
        self._clock = clock
        self._left = 0
        self._next_s = 0.0

    def met_peer(self) -> None:
        """Take a turn, and schedule the turns that a new peer's connections need."""
        self._take()
        self._left = _TURNS
        self._next_s = self._clock() + _GAP_S

    def take_due(self) -> None:
        """Take the turn that is due, if any; call often."""
        if not self._left or self._clock() < self._next_s:
            return
        self._take()
        self._left -= 1
        doublings = max(0, _TURNS - _EVEN_TURNS + 1 - self._left)
        self._next_s = self._clock() + _GAP_S * 2**doublings

    def _take(self) -> None:
        """Start a turn unless the last one is still running; never raises, and waits only until the threads have started."""
        agent = self._agent
        if agent is None:
            return
        try:
            if self._transfer is None:
                self._transfer = self._made(agent)
            elif agent.check_xfer_state(self._transfer) == "PROC":
                return
            agent.transfer(self._transfer)
        except Exception:  # noqa: BLE001 - sockets that stay open are no reason to refuse a peer
            self._agent = self._transfer = None

    def _made(self, agent: NixlAgent) -> object:
        step_bytes = _GAP_PIECES * _PIECE_BYTES
        memory = np.zeros(2 * self._pieces * step_bytes, dtype=np.uint8)
        address = int(memory.ctypes.data)
        agent.register_memory(np.array([[address, memory.nbytes, 0]], dtype=np.uint64), "DRAM")
        # The agent keeps no reference to registered memory.
        self._memory = memory
        offsets = np.arange(2 * self._pieces, dtype=np.uint64) * np.uint64(step_bytes)
        rows = np.zeros((2 * self._pieces, 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = np.uint64(address) + offsets, _PIECE_BYTES
        lists = [agent.get_xfer_descs(half, "DRAM") for half in (rows[: self._pieces], rows[self._pieces :])]
        return agent.initialize_xfer("READ", lists[0], lists[1], self._name, b"", [_PLUGIN])

    def end(self) -> None:
        """Stop taking turns and drop all references to the agent; waits at most half a second for the last turn to end."""
        agent, transfer = self._agent, self._transfer
        give_up_s = time.monotonic() + _END_WAIT_S
        with contextlib.suppress(Exception):
            while agent is not None and transfer is not None and agent.check_xfer_state(transfer) == "PROC":
                if time.monotonic() > give_up_s:
                    break
                time.sleep(_LOOK_EVERY_S)
        self._agent = self._transfer = None
