"""A turn for each of UCX's worker threads, so that they notice connections that have ended.

A worker thread of NIXL's UCX backend makes progress only while it carries a part of a transfer, and only transfers of many
descriptors are shared among the threads. An agent whose reads are small would keep the sockets of each peer that has died or
closed, one for each worker (two over TCP), in CLOSE_WAIT for ever. Measured with NIXL 1.5 and four threads: 4 sockets for each
lost peer, 8 over TCP; none after such a turn. Without worker threads nothing is kept.

A turn is a read of this agent from itself, of so many descriptors that each thread usually gets a part. Nobody waits for
its end, but a close does for a moment: an agent must not be destroyed while its threads copy.

Example: 4 threads and parts of 128 descriptors: 512 descriptors of 8 bytes, in 16 KB of memory of its own.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._nixl_api import NixlAgent

__all__ = ["WorkerTurns"]

_PLUGIN: Final = "UCX"
_PIECE_BYTES: Final = 8
_GAP_PIECES: Final = 2
"""Pieces that lie side by side would be merged into one descriptor."""
_PLUGINS_SPLIT: Final = 1024
_END_WAIT_S: Final = 0.5
_LOOK_EVERY_S: Final = 0.001


@final
class WorkerTurns:
    """Lets the worker threads of an agent take a turn; does nothing where it has none, or where NIXL cannot read from itself."""

    __slots__ = ("_agent", "_memory", "_name", "_pieces", "_transfer")

    def __init__(self, agent: NixlAgent, name: str, parameters: Mapping[str, str]) -> None:
        """Keep what a turn needs; nothing is registered before the first one.

        Args:
            agent: The agent, with its backends.
            name: Its name.
            parameters: Those of its UCX backend, as NIXL spells them.
        """
        threads = int(parameters.get("num_threads", "0"))
        self._agent: NixlAgent | None = agent if threads else None
        self._name = name
        self._pieces = threads * int(parameters.get("split_batch_size", _PLUGINS_SPLIT))
        self._memory: object = None
        self._transfer: object = None

    def take(self) -> None:
        """Begin a turn, unless the last one goes on; never raises, and waits only until the threads have begun."""
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
        # The agent keeps no reference to memory that is registered.
        self._memory = memory
        offsets = np.arange(2 * self._pieces, dtype=np.uint64) * np.uint64(step_bytes)
        rows = np.zeros((2 * self._pieces, 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = np.uint64(address) + offsets, _PIECE_BYTES
        lists = [agent.get_xfer_descs(half, "DRAM") for half in (rows[: self._pieces], rows[self._pieces :])]
        return agent.initialize_xfer("READ", lists[0], lists[1], self._name, b"", [_PLUGIN])

    def end(self) -> None:
        """Take no further turns, and hold nothing of the agent's; waits until the last one has ended, half a second at most."""
        agent, transfer = self._agent, self._transfer
        give_up_s = time.monotonic() + _END_WAIT_S
        with contextlib.suppress(Exception):
            while agent is not None and transfer is not None and agent.check_xfer_state(transfer) == "PROC":
                if time.monotonic() > give_up_s:
                    break
                time.sleep(_LOOK_EVERY_S)
        self._agent = self._transfer = None
