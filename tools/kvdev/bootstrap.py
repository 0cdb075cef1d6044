"""From a bare Python to the workspace's: find or install uv, make `.venv`, start this program again inside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvdev.envs import workspace_environment
from kvdev.paths import ROOT
from kvdev.uvtool import find_or_install_uv

__all__ = ["enter_workspace"]

_MARK = "KVDEV_UV"


def enter_workspace(arguments: list[str]) -> Path:
    """Return uv when already inside the workspace's environment; otherwise start again there (does not return)."""
    if _MARK in os.environ:
        return Path(os.environ[_MARK])
    uv = find_or_install_uv()
    python = workspace_environment(uv)
    env = {**os.environ, _MARK: str(uv)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(python, [str(python), str(ROOT / "tools" / "dev.py"), *arguments], env)
