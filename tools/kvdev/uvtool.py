"""Find or install uv, and the variables that it runs under."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvdev.paths import STATE
from kvdev.steps import note, run_step

_PRIVATE = STATE / "uv"


def find_or_install_uv() -> Path:
    """Return a uv: the one on PATH, or a private one installed with pip into `.dev/uv`."""
    on_path, private = shutil.which("uv"), _PRIVATE / "bin" / "uv"
    if on_path:
        return Path(on_path)
    if not private.exists():
        note("uv is not on PATH: installing a private one")
        shutil.rmtree(_PRIVATE, ignore_errors=True)
        run_step("make uv environment", [sys.executable, "-m", "venv", _PRIVATE], timeout_s=120)
        words = ["install", "--disable-pip-version-check", "--quiet", "uv>=0.9"]
        run_step("install uv", [_PRIVATE / "bin" / "pip", *words], timeout_s=300)
    return private


def uv_environment() -> dict[str, str]:
    """Give uv what pip is configured with: uv does not read pip's configuration."""
    env = {"UV_LINK_MODE": "hardlink", "UV_NO_PROGRESS": "1", **os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    env.pop("VIRTUAL_ENV", None)
    for pip_key, uv_key in (
        ("find-links", "UV_FIND_LINKS"),
        ("index-url", "UV_DEFAULT_INDEX"),
        ("cert", "SSL_CERT_FILE"),
    ):
        value = _pip_setting(pip_key)
        if value and uv_key not in env:
            env[uv_key] = ",".join(value.split()) if uv_key == "UV_FIND_LINKS" else value
    return env


def _pip_setting(key: str) -> str | None:
    value = os.environ.get("PIP_" + key.upper().replace("-", "_"))
    if value:
        return value
    command = [f"{sys.base_prefix}/bin/python3", "-m", "pip", "config", "get", f"global.{key}"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return finished.stdout.strip() or None
