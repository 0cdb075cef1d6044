"""Cores of the transfer thread: those that the operator gave the process, whatever the host bound its threads to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from factories import attention_caches, facts

from kv_nixl_agent.testing import FakeFabric
from vllm_adapter import cores
from vllm_adapter.config import Settings
from vllm_adapter.wiring import make_worker

ALLOWED = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(ALLOWED) < 2, reason="this process may use one core only")
THREAD = """
import os
{before}
from vllm_adapter.cores import allowed_cores
allowed_cores()
{after}
from factories import attention_caches, facts
from kv_nixl_agent.testing import FakeFabric
from vllm_adapter.config import Settings
from vllm_adapter.wiring import make_worker
seen = []
worker = make_worker(facts(), Settings(), port_factory=FakeFabric().port)
worker.register(attention_caches(), select_device=lambda: seen.append(sorted(os.sched_getaffinity(0))))
worker.close()
print(seen)
"""


BIND_FIRST, BIND_LAST = (f"os.sched_setaffinity(0, {{{core}}})" for core in (ALLOWED[0], ALLOWED[-1]))


@needs_two_cores
@pytest.mark.parametrize(
    ("before", "after", "variable", "expected"),
    [
        pytest.param(BIND_LAST, "", "", [ALLOWED[-1]], id="taskset"),
        pytest.param("", BIND_FIRST, "", ALLOWED, id="bound by the host"),
        # OpenMP binds a worker before any of our code runs: the cores of its engine count.
        *(
            pytest.param(BIND_FIRST, "", variable, ALLOWED, id=variable)
            for variable in ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
        ),
    ],
)
def test_the_transfer_thread_uses_the_cores_that_the_process_was_given(
    before: str, after: str, variable: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, str(ALLOWED[0]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    program = THREAD.format(before=before, after=after)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str([expected])


def _cgroup(root: Path, name: str, **files: str) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file.replace("__", ".")).write_text(content)


def test_a_cgroups_quota_counts_as_so_many_cores(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/pod/container\n")
    assert cores._quotas(tmp_path / "none", membership) == []
    root = tmp_path / "v2"
    _cgroup(root, "pod/container", cpu__max="250000 100000\n")
    _cgroup(root, "pod", cpu__max="max 100000\n")
    assert cores._quotas(root, membership) == [3]
    _cgroup(root, "pod", cpu__max="50000 100000\n")
    assert cores._quotas(root, membership) == [3, 1]
    _cgroup(root, "pod", cpu__max="odd")
    assert cores._quotas(root, membership) == [3]
    membership.write_text("0::/pod/pod.slice:cri:1\n")
    _cgroup(root, "pod/pod.slice:cri:1", cpu__max="200000 100000\n")
    assert cores._quotas(root, membership) == [2]


def test_nixls_progress_thread_needs_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "allowed_cores", lambda: frozenset(range(4)))
    assert not cores.has_cores_to_spare()
    monkeypatch.setattr(cores, "allowed_cores", lambda: frozenset(range(64)))
    monkeypatch.setattr(cores, "_quotas", lambda *_places: [2])
    assert not cores.has_cores_to_spare()
    monkeypatch.setattr(cores, "_quotas", lambda *_places: [])
    assert cores.has_cores_to_spare()


def test_what_the_thread_does_first_may_refuse_to_start_it() -> None:
    """A device that cannot be selected stops the engine here, with the reason, not at the first transfer."""
    worker = make_worker(facts(), Settings(), port_factory=FakeFabric().port)

    def refuse() -> None:
        raise RuntimeError("invalid device ordinal")

    with pytest.raises(Exception, match="invalid device ordinal"):
        worker.register(attention_caches(), select_device=refuse)
