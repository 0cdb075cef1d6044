"""Where things lie in a checkout."""

from __future__ import annotations

from pathlib import Path

__all__ = ["HOST_VENV", "LOCK", "PACKAGES", "ROOT", "SLOW_TESTS", "STATE", "WORKSPACE_VENV", "package_sources"]

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".dev"
SLOW_TESTS = STATE / "slow-tests.txt"
"""Tests of the last short run that took too long for it (`kvdev.testing`); `dev.py check` refuses them."""
LOCK = ROOT / "uv.lock"
WORKSPACE_VENV = ROOT / ".venv"
HOST_VENV = ROOT / ".venv-host"
PACKAGES = ("kv-handshake", "kv-topology", "kv-nixl-agent", "kv-scheduler-state", "vllm-adapter")


def package_sources() -> list[Path]:
    """List every file that goes into one of the five wheels, sorted."""
    found: list[Path] = []
    for name in PACKAGES:
        package = ROOT / "packages" / name
        found += [package / "pyproject.toml", package / "README.md"]
        found += [p for p in (package / "src").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    return sorted(found)
