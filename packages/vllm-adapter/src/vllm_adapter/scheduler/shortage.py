"""Shortages: requests could start but find no free blocks while the engine computes nothing.

Leases keep blocks until their readers come, and normally a request just waits for that, as it does with vLLM's own connector.
But an engine that also reads may be in a circle: its blocks are leased to a peer whose requests wait for blocks there, which are
leased to requests that wait here. Each side renews the leases that keep the other from reading, so neither ends by itself. Such
an engine gives up its newest waiting read (`SchedulerState.give_way`): the prompt is computed here, and the peer gets its blocks
back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from vllm_adapter.observe.recorder import Guard

if TYPE_CHECKING:
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import SchedulerState
    from vllm_adapter.scheduler.holdings import Holdings

__all__ = ["Shortage"]

_PATIENCE_S: Final = 1.0
"""Wait before a shortage counts, and between two reads that are given up: blocks that free themselves, as at the end of a read,
are free by then."""


@final
class Shortage:
    """Gives up a waiting read if this engine and a peer may each wait for blocks that are leased to the other."""

    def __init__(self, state: SchedulerState, recorder: Recorder, holdings: Holdings) -> None:
        self._state, self._recorder, self._holdings = state, recorder, holdings
        # Since when the host has had requests ready for blocks in steps that compute nothing.
        self._since_s: float | None = None

    def relieve(self, now_s: float, *, is_short: bool) -> None:
        """Give a read up if requests have lacked blocks for a second.

        To be called once at the end of each step; the wait begins anew with each read that is given up. Example: from 2.0 s on,
        in empty steps, the host is given 48 tokens and allocates nothing: a read is given up at 3.0 s and, if nothing changes,
        about a second later again.
        """
        if not is_short:
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < _PATIENCE_S:
            return
        self._since_s = None
        with Guard(self._recorder, "giving up a read", consequence="requests that wait for blocks go on waiting"):
            request_id = self._state.give_way(now_s=now_s)
            if request_id:
                self._recorder.observe("num_cancelled_reads", "blocks-leased")
                self._recorder.warning(
                    "blocks-leased",
                    "request %s: its read is given up and its prompt computed here (blocks-leased): for a second nothing could "
                    "run for want of blocks, and peers have leases on some (leases: %d, blocks: %d) and may wait for blocks "
                    "that they keep for this engine; its peer gets its blocks back. Give both engines more cache if this goes on",
                    request_id,
                    *self._holdings.leases[:2],
                )
