"""The processor cores that this process may use.

Theory of operation. On a CPU, vLLM binds a worker's main thread to the first core of its OpenMP threads, and threads started
from it inherit that single core: the transfer thread would run where the model computes. So that thread is moved back to the
cores that the *process* was given, by `taskset`, a container's cpuset or a NUMA binding, and to no others. These cores are
recorded when vLLM calls our plugin. In a worker that is too late: vLLM starts workers with OpenMP's variables, and OpenMP binds
the first thread as soon as it is loaded. There the parent's cores are used: the engine core runs on those the operator gave it.

The useful number of threads also depends on CPU time: a container may hold 64 cores and a quota of 4.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["allowed_cores", "has_cores_to_spare", "use_allowed_cores"]

_CGROUPS = Path("/sys/fs/cgroup")
_OPENMP_BINDINGS = frozenset({"KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"})
"""Variables by which vLLM lets OpenMP bind a worker's threads. Source: `vllm.utils.ompmultiprocessing`, 0.32."""
_CORES_TO_SPARE = 8


@cache
def allowed_cores() -> frozenset[int]:
    """Return the cores of the process: those of the first thread that calls this, and its parent's where OpenMP binds threads.

    All cores on systems without affinities.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    own = frozenset(os.sched_getaffinity(0))
    if _OPENMP_BINDINGS.isdisjoint(os.environ):
        return own
    with suppress(OSError):  # the parent may have ended
        return own | os.sched_getaffinity(os.getppid())
    return own


def use_allowed_cores() -> None:
    """Let the calling thread run on every core that the process was given, and on no other.

    Where that is forbidden, or the cores have been taken away since, the thread stays where it is.
    """
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, allowed_cores())


def has_cores_to_spare() -> bool:
    """Return whether a thread of NIXL's own that never sleeps leaves the engine enough cores.

    They are the cores that the process was given, or fewer by its cgroup's quota. Example: 16 cores and a quota of 250 in 100 ms
    count as 3.
    """
    return min([len(allowed_cores()), *_quotas(_CGROUPS, Path("/proc/self/cgroup"))]) > _CORES_TO_SPARE


def _quotas(root: Path, membership: Path) -> list[int]:
    """Return the whole cores that the quotas of this process's cgroup (version 2) and its ancestors allow, at least one each."""
    found: list[int] = []
    try:
        own = root / membership.read_text().strip().rpartition("\n")[2].split(":", 2)[-1].lstrip("/")
    except OSError:
        return found
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no quota, or one in another form
            quota, period = (folder / "cpu.max").read_text().split()
            found.append(max(1, math.ceil(int(quota) / int(period))))
    return found
