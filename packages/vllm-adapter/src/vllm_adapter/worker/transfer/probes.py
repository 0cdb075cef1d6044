"""Probes of engines that are not being read from. Transfer thread only.

One word of such an engine is read every `probe_s`. The engine is dropped after two consecutive probes without an answer, or
after one that finds its process gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_adapter.ports import TransferResult
    from vllm_adapter.worker.transfer.parts import TransferParts
    from vllm_adapter.worker.transfer.records import PeerEngine

__all__ = ["Probes"]

_SILENT_PROBES = 2
_PROBE_DEADLINE_S = 2.0


@final
class Probes:
    """Checks whether idle engines still answer.

    Args:
        parts: The registration's threads, recorder and clock.
        probe_s: Time between an engine's last answer and its next probe.
        drop: Called with an engine that is gone, and the reason.
    """

    def __init__(self, parts: TransferParts, probe_s: float, drop: Callable[[PeerEngine, str], None]) -> None:
        self._parts = parts
        self._probe_s = probe_s
        self._drop = drop
        self._running: dict[str, PeerEngine] = {}
        self._count = 0

    def look_after(self, engine: PeerEngine, now_s: float) -> None:
        """Probe an idle engine whose last answer is too old; repeat at once if its last probe had no answer."""
        if not engine.is_probed and (engine.silent_probes or now_s - engine.last_answer_s > self._probe_s):
            self._probe(engine)

    def _probe(self, engine: PeerEngine) -> None:
        if engine.plan is None or not engine.plan.producer_ranks:
            return  # no memory of this engine can be read
        # A request's transfers are named "<request>/<rank>", so no transfer has the name of a probe.
        self._count += 1
        probe_id = f"probe {self._count}"
        self._running[probe_id] = engine
        engine.is_probed = True
        try:
            self._parts.agent.probe(probe_id, engine.key(engine.plan.producer_ranks[0]), deadline_s=_PROBE_DEADLINE_S)
        except Exception as error:  # noqa: BLE001  (a peer that cannot be probed is let go by its age)
            del self._running[probe_id]
            engine.is_probed, engine.last_answer_s = False, self._parts.now_s()
            self._parts.recorder.trouble("probe of an idle engine", error)

    def ended(self, result: TransferResult) -> None:
        """Process the end of a probe; results of other transfers are ignored."""
        engine = self._running.pop(result.transfer_id, None)
        if engine is None:
            return
        engine.is_probed = False
        if result.outcome == "done":
            engine.silent_probes, engine.last_answer_s = 0, self._parts.now_s()
            return
        if result.outcome == "cancelled" or result.fault == "local" or engine.phase != "ready":
            return  # the result says nothing about the engine, which is probed again
        engine.silent_probes += 1
        is_gone = result.code == "peer-disconnected"
        if is_gone or engine.silent_probes >= _SILENT_PROBES:
            reason = "its process is gone" if is_gone else f"{engine.silent_probes} probes had no answer"
            self._drop(engine, f"{reason} ({result.code}: {result.message})")
