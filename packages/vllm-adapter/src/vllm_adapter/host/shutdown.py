"""Detection of the host's shutdown, from which on the scheduler's connector grants no tickets.

vLLM tells its connectors nothing before `shutdown()`, which it calls after its last step. But its engine-core process receives
the signal, and creates the scheduler's connector after it has installed its handler, on the same thread. So that handler is
extended here and called as before (ADR 0009).
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig

__all__ = ["LEASES_OF_A_DRAIN", "warn_of_short_drain", "watch_for_shutdown"]

_logger = logging.getLogger("vllm.vllm_adapter")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXTENDED = frozenset({"vllm", "vllm_adapter"})
"""Top-level packages whose handlers are extended; ours, for several connectors of this kind in one engine."""
LEASES_OF_A_DRAIN = 2
"""A ticket given just before the signal stays readable for one lease; a reader that starts at its end needs most of another."""


def warn_of_short_drain(config: VllmConfig, lease_s: float) -> None:
    """Warn about an engine that grants tickets but may end before they are read, as it does by the host's default of 0.

    Example: with a lease of 30 s, a `--shutdown-timeout` of 59 causes a warning and one of 60 does not.
    """
    least_s = LEASES_OF_A_DRAIN * lease_s
    transfer = config.kv_transfer_config
    timeout_s: int = getattr(config, "shutdown_timeout", 0)  # hosts that do not drain lack this setting
    if transfer is None or not transfer.is_kv_producer or timeout_s >= least_s:
        return
    _logger.warning(
        "--shutdown-timeout %d: unread tickets are lost %s SIGTERM; set %d or more (twice the lease) and a longer grace period "
        "in the supervisor",
        timeout_s,
        f"{timeout_s} s after" if timeout_s else "on",
        math.ceil(least_s),
    )


def watch_for_shutdown() -> Callable[[], bool]:
    """Note SIGTERM and SIGINT in addition to the host's own handlers; return a function that tells whether one has arrived.

    Only handlers that vLLM installed are extended: those of an application that runs vLLM inside its own process, and Python's,
    mean something else. Handlers can only be replaced on the main thread.
    """
    received: list[int] = []

    def extend(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
        def note(number: int, frame: Any) -> Any:  # noqa: ANN401  (a frame, or None)
            # It may interrupt any line of the engine's thread, so it takes no lock and logs nothing.
            received.append(number)
            return handler(number, frame)

        return note

    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and str(handler.__module__).partition(".")[0] in _EXTENDED:
                signal.signal(number, extend(handler))
    return lambda: bool(received)
