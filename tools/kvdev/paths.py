"""Where things lie in a checkout, and what its packages say of themselves."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

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


def project_of(folder: Path) -> dict[str, Any]:
    """Return the table `[project]` of a package, with the version that its `__init__.py` holds."""
    document = tomllib.loads((folder / "pyproject.toml").read_text())
    project: dict[str, Any] = document["project"]
    text = (folder / document["tool"]["hatch"]["version"]["path"]).read_text()
    project["version"] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]
    return project


def siblings_of(package: str, root: Path = ROOT) -> list[str]:
    """Return the packages of this repository that one of them depends on."""
    needs = " ".join(project_of(root / "packages" / package)["dependencies"])
    return [name for name in re.findall(r"[\w.-]+", needs) if name in PACKAGES]
