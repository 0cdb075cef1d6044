"""Loaded by every Python process of an engine under test, before anything else: let waiting processes sleep.

vLLM's processes wait for one another with `sched_yield` in a loop. Linux kernels since 6.18 keep their books wrong when several
processes do that on the same few cores: all other threads of the machine then stand still for up to a minute, with the cores busy
(seen on 6.18.44 with two cores and two tensor-parallel ranks: threads of the real-time class ran, ordinary ones did not for 54 s;
hand-overs took 0.6 to 108 s). With a short sleep instead they took 0.1 to 0.3 s, six fleets of six.
"""

from __future__ import annotations

import os
import time

_PAUSE_S = 0.0001


def _sleep_shortly() -> None:
    time.sleep(_PAUSE_S)


if hasattr(os, "sched_yield"):
    os.sched_yield = _sleep_shortly
