"""Sleep of NIXL's progress thread.

NIXL's thread waits in `poll` for events of its transports, and also checks after `pthrDelay`, for transports that miss some.
NIXL's Python package sets that delay to zero and offers no key for it: `poll` then returns at once, and the thread takes a whole
core for as long as the agent lives, idle or not. This module changes the configuration on its way from NIXL's Python class into
its extension module. Agents that other threads of the process create at the same moment get the same delay.

An event wakes the thread at once, and the thread that posted a read polls UCX for it by itself, so no read waits for the delay:
with a delay of 60 s on both sides, reads of 16 KB to 32 MB and their notifications end as usual
(`integration_tests/real_io/test_progress_thread.py`). An event that UCX does not report, which NIXL's source warns about, is
found after 50 ms. The figures are in docs/performance.md.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["sleeping_progress_thread"]

_PERIOD_US: Final = 50_000
"""Idle CPU of an agent with four worker threads: 100 % of a core at 0, 0.3 % at 5000, 0.12 % at 20000, 0.06 % at 50000."""

_lock = threading.Lock()


@final
class _Extension:
    """NIXL's extension module, except that agents are made with a period for the progress thread."""

    def __init__(self, real: Any) -> None:  # noqa: ANN401
        self._real = real

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._real, name)

    def nixlAgent(self, name: str, configuration: Any) -> Any:  # noqa: ANN401, N802  (NIXL's spelling)
        """Make an agent whose progress thread sleeps."""
        if getattr(configuration, "pthrDelay", None) == 0:
            with suppress(AttributeError, TypeError):  # another NIXL: its thread polls without a pause
                configuration.pthrDelay = _PERIOD_US
        return self._real.nixlAgent(name, configuration)


@contextmanager
def sleeping_progress_thread(agent_class: type[Any]) -> Generator[None]:
    """Give agents of this class that are created within the block a progress thread that sleeps between events.

    A NIXL that is built differently is left as it is: its thread then polls without a pause.
    """
    module = sys.modules.get(agent_class.__module__)
    with _lock:
        real: Any = getattr(module, "nixlBind", None)
        if real is None or not hasattr(real, "nixlAgent"):
            yield
            return
        setattr(module, "nixlBind", _Extension(real))  # noqa: B010  (of a module that type checkers do not know)
        try:
            yield
        finally:
            setattr(module, "nixlBind", real)  # noqa: B010
