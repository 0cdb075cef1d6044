"""Health of the transfer thread, as metrics and log lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import ThreadHealth, TransferThread

__all__ = ["ThreadWatch"]


@final
class ThreadWatch:
    """Reports death, stuck turns, callback errors and quarantine of a rank's transfer thread. Engine thread only.

    Args:
        recorder: Records observations and log lines.
        engine_id: This engine, for log lines.
    """

    def __init__(self, recorder: Recorder, engine_id: str) -> None:
        self._recorder = recorder
        self._engine_id = engine_id
        self._errors: tuple[TransferThread, int] | None = None
        self._reported_dead: TransferThread | None = None
        self._is_stuck = False

    def check(self, agent: TransferThread | None) -> None:
        """Report changes since the last call; None while nothing is registered."""
        held = agent.quarantine() if agent is not None else ()
        self._recorder.level("quarantined_bytes", sum(entry.bytes_at_risk for entry in held))
        if agent is None:
            self._recorder.level("stuck_threads", 0)
            return
        health = agent.health()
        self._check_errors(agent, health)
        self._check_state(agent, health.state)

    def _check_errors(self, agent: TransferThread, health: ThreadHealth) -> None:
        """Count new errors of callbacks and turns; log each increase once, with the traceback of the latest error."""
        errors = health.callback_errors + health.loop_errors
        known = self._errors[1] if self._errors is not None and self._errors[0] is agent else 0
        self._errors = (agent, errors)
        if errors > known:
            self._recorder.count("num_callback_errors", errors - known)
            self._recorder.error(
                "thread-errors",
                f"the transfer thread of engine {self._engine_id} caught {errors - known} unexpected errors; "
                f"the latest: {health.last_error}",
                health.last_traceback,
            )

    def _check_state(self, agent: TransferThread, state: str) -> None:
        is_stuck = state == "stuck"
        self._recorder.level("stuck_threads", int(state in {"stuck", "dead"}))
        if is_stuck and not self._is_stuck:
            self._recorder.error(
                "thread-stuck",
                f"the transfer thread of engine {self._engine_id} is stuck in one turn: no read and no lease of this rank "
                "makes progress",
            )
        self._is_stuck = is_stuck
        if state == "dead" and self._reported_dead is not agent:
            self._reported_dead = agent
            self._recorder.error(
                "thread-dead", f"the transfer thread of engine {self._engine_id} has died; restart this engine"
            )
