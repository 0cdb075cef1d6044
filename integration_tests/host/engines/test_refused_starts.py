"""Engines whose configuration cannot work: they end before their weights load, and the last line of the log says why."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
from pathlib import Path

import pytest
from fleets import VLLM, forks, ours, own_name, probe_environment, probed

from kvdev.engines import Engine, EngineSpec, local_model

WITHIN_CPU_S = 120
"""Of a new Python, as users start it: 8 s of either kind where nothing else runs; 41 where vLLM inspects the model anew."""
LOADING = re.compile("load(ing)? (the )?(model|weights)|model loading", re.IGNORECASE)
AMONG_OTHERS: dict[str, object] = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [ours(ticket_secrets=["/run/no-such-secret"])]},
}
MISTAKES: dict[str, tuple[dict[str, object], dict[str, str]]] = {
    "unknown-key": (own_name(fence_slot=4096), {}),
    "out-of-range": (probed(kv_lease_duration=0.5), {}),
    "invalid-secret": (AMONG_OTHERS, {}),
    "side-channel-wildcard": (ours("kv_producer"), {"VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0"}),
    "bind-failed": (ours(), {}),
}


def _of_zombie(pid: int) -> tuple[int, float]:
    """Return the exit code and CPU seconds of an ended process that its parent, the starter, has not reaped."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return os.waitstatus_to_exitcode(int(fields[49])), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("code", MISTAKES)
def test_a_mistake_ends_an_engine_before_its_weights_load(code: str, tmp_path: Path) -> None:
    config, environment = MISTAKES[code]
    python, model = local_model(Path(os.environ["KVDEV_UV"]), "dense", VLLM)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if code == "bind-failed":
            environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(taken.getsockname()[1])}
        environment = {**environment, **probe_environment(tmp_path)}
        spec = EngineSpec(f"refused-{code}", model, "0", config, environment=environment)
        is_fork = code != "unknown-key"  # a fork costs no imports
        engine = Engine(spec, python, launch=forks(python) if is_fork else None)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            assert engine.has_ended(240), engine.last_words()
            exit_code, fork_cpu_s = _of_zombie(engine._process.pid) if is_fork else (engine._process.poll(), 0.0)
        finally:
            engine.signal_all(signal.SIGKILL)
            engine.wait_ended()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert fork_cpu_s + after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < WITHIN_CPU_S
    assert exit_code == 1
    log = engine.log.read_text()
    assert re.search(rf"kv-transfer: [^\n]+ \({code}\)\n$", log), log[-2000:]
    assert (log.count("kv-transfer: "), LOADING.findall(log)) == (1, [])
