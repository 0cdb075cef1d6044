"""The host of the GPU stage: an environment with a CUDA build of vLLM, found and not made, and our packages beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kvdev.envs import TEST_TOOLS, build_wheels, pip_install
from kvdev.locking import exclusive
from kvdev.paths import STATE

HOST_VARIABLE = "KVDEV_GPU_PYTHON"
"""Names the python of an environment that holds a CUDA vLLM, where neither `vllm` nor `python3` on the path belongs to one."""
READ_DIRECTLY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
"""UCX's own choice is to read another process's GPU memory through CUDA IPC only where the GPU has NVLinks, and else through TCP.

Two engines on one GPU need no NVLink, so the stage turns it on; a value from outside is left as it is.
"""
_PROBE = "import torch, vllm; assert torch.cuda.is_available(), 'torch sees no CUDA device'"


def cuda_host() -> tuple[Path | None, str]:
    """Return (python of a CUDA vLLM, "") or (None, why there is none here)."""
    driver = shutil.which("nvidia-smi")
    if driver is None or subprocess.run([driver, "-L"], capture_output=True, check=False, timeout=60).returncode != 0:
        return None, "this machine has no NVIDIA GPU"
    named, command = os.environ.get(HOST_VARIABLE), shutil.which("vllm")
    # Not resolved: the python beside a command in a venv is a link.
    candidates = (
        [named] if named else [str(Path(command).parent / "python3") if command else None, shutil.which("python3")]
    )
    reasons: list[str] = []
    for python in filter(None, candidates):
        try:
            subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=True, timeout=180, cwd="/")
        except subprocess.CalledProcessError as error:
            reasons.append(f"{python}: {error.stderr.strip().splitlines()[-1:]}")
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{python}: {error}")
        else:
            return Path(python), ""
    return None, f"no CUDA vLLM was found, {HOST_VARIABLE} may name its python (tried {reasons})"


def install_beside(uv: Path, python: Path) -> Path:
    """Install our five wheels and pytest into a folder of this checkout for `python`; its own packages stay as they are."""
    site = STATE / "gpu-site"
    with exclusive():
        shutil.rmtree(site, ignore_errors=True)
        wheels = build_wheels(uv)
        pip_install(uv, "install our packages for the CUDA vLLM", python, "--target", site, "--no-deps", *wheels)
        pip_install(uv, "install pytest for the CUDA vLLM", python, "--target", site, *TEST_TOOLS)
    return site


def gpu_environment(python: Path, site: Path, *, device: str = "cuda") -> Mapping[str, str]:
    """Return the variables under which the stage's tests run, and start engines, on a device."""
    return {
        "KVDEV_DEVICE": device,
        "KVDEV_HOST_PYTHON": str(python),
        "KVDEV_HOST_SITE": str(site),
        READ_DIRECTLY: os.environ.get(READ_DIRECTLY, "on"),
    }
