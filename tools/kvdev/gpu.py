"""The host of the GPU stage: an environment with a CUDA build of vLLM, found and not made, and our packages beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from kvdev.envs import build_wheels
from kvdev.paths import STATE
from kvdev.steps import run_step
from kvdev.uvtool import exclusive, uv_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["READ_DIRECTLY", "cuda_host", "gpu_environment", "has_gpu", "install_beside"]

HOST_VARIABLE = "KVDEV_GPU_PYTHON"
"""Names the python of an environment that holds a CUDA vLLM, where neither `vllm` nor `python3` on the path belongs to one."""
READ_DIRECTLY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
"""UCX's own choice is to read another process's GPU memory through CUDA IPC only where the GPU has NVLinks, and else through TCP.

Two engines on one GPU need no NVLink, so the stage turns it on; a value from outside is left as it is.
"""
_PROBE = "import torch, vllm; assert torch.cuda.is_available(), 'torch sees no CUDA device'"
_PROBE_S = 180


def has_gpu() -> bool:
    """Whether the driver's own tool shows a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    return subprocess.run([command, "-L"], capture_output=True, check=False, timeout=60).returncode == 0


def cuda_host() -> tuple[Path | None, str]:
    """Return (python of a CUDA vLLM, "") or (None, the reason for each that was tried)."""
    reasons: list[str] = []
    for python in _candidates():
        try:
            done = subprocess.run(
                [python, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=_PROBE_S, cwd="/"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{python}: {error}")
            continue
        if done.returncode == 0:
            return python, ""
        reasons.append(f"{python}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    tried = "; ".join(reasons) or "there is neither a `vllm` nor a `python3` on the path"
    return None, f"no CUDA vLLM was found, {HOST_VARIABLE} may name its python ({tried})"


def _candidates() -> list[Path]:
    """Return pythons to ask, the one that was named alone if there is one."""
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return [Path(named)]
    found: list[Path] = []
    command = shutil.which("vllm")
    if command is not None:
        beside = Path(command).parent / "python3"  # not resolved: a venv's python is a link
        found += [beside] if beside.exists() else []
    python = shutil.which("python3")
    return found + ([Path(python)] if python and Path(python) not in found else [])


def install_beside(uv: Path, python: Path) -> Path:
    """Install our five wheels and pytest into a folder of this checkout for `python`; its own packages stay as they are."""
    site = STATE / "gpu-site"
    with exclusive():
        shutil.rmtree(site, ignore_errors=True)
        wheels = sorted(build_wheels(uv).glob("*.whl"))
        pip: list[str | Path] = [uv, "pip", "install", "--no-config", "--python", python, "--target", site]
        run_step("install our packages for the CUDA vLLM", [*pip, "--no-deps", *wheels], env=uv_environment())
        tools = ["pytest>=8.3", "pytest-timeout>=2.3"]
        run_step("install pytest for the CUDA vLLM", [*pip, *tools], env=uv_environment(), timeout_s=300)
    return site


def gpu_environment(python: Path, site: Path, *, device: str = "cuda") -> Mapping[str, str]:
    """Return the variables under which the stage's tests run, and start engines, on a device."""
    return {
        "KVDEV_DEVICE": device,
        "KVDEV_HOST_PYTHON": str(python),
        "KVDEV_HOST_SITE": str(site),
        READ_DIRECTLY: os.environ.get(READ_DIRECTLY, "on"),
    }
