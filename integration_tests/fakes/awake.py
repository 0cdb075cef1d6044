"""A clock for bounds on waiting that stands while this process has no core."""

from __future__ import annotations

import threading
import time
from typing import Self, final

_STEP_S = 0.005
_MOST_S = 0.02


@final
class AwakeClock:
    """Seconds during which this process had a core: a thread sleeps 5 ms at a time and adds up the sleeps.

    A sleep counts as 20 ms at most, or as the processor time that the whole process took meanwhile, if that is more: a thread
    that computes while it keeps all others waiting does not stop this clock.

    Example: the machine stands still for 2 s in a wait of 0.3 s: 2.3 s by the clock on the wall, 0.32 s by this one. A wait for a
    time-out of 0.5 s counts as that, and so do 0.5 s of computing without a pause.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self) -> float:
        return self._now_s

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last_s, last_work_s = time.monotonic(), time.process_time()
        while not self._stop.is_set():
            time.sleep(_STEP_S)
            now_s, work_s = time.monotonic(), time.process_time()
            self._now_s += min(now_s - last_s, max(_MOST_S, work_s - last_work_s))
            last_s, last_work_s = now_s, work_s
