"""Each import contract, broken on purpose in a copy of the sources: the contract and the module are named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvdev.paths import PACKAGES, ROOT

CONFIG = ROOT / "importlinter.toml"
CONTRACTS: dict[str, str] = {
    contract["id"]: contract["name"]
    for contract in tomllib.loads(CONFIG.read_text())["tool"]["importlinter"]["contracts"]
}
# contract -> the module that gets a forbidden line, and the line. A module that is not there yet is made.
VIOLATIONS: dict[str, tuple[str, str]] = {
    "libraries-are-independent": ("kv_topology.errors", "import kv_handshake"),
    "libraries-know-no-host": ("kv_nixl_agent.errors", "import torch"),
    "wiring-names-classes": ("vllm_adapter.config", "import kv_scheduler_state"),
    "handshake-third-party": ("kv_handshake.errors", "import numpy"),
    "topology-third-party": ("kv_topology.errors", "import msgspec"),
    "agent-third-party": ("kv_nixl_agent.errors", "import zmq"),
    "state-third-party": ("kv_scheduler_state.errors", "import numpy"),
    "adapter-third-party": ("vllm_adapter.worker.planted", "import zmq"),
    "pure-packages": ("kv_scheduler_state.errors", "import time"),
    "one-module-imports-zmq": ("kv_handshake.errors", "import zmq"),
    "one-module-loads-nixl": ("kv_nixl_agent.errors", "import nixl"),
    "host-room-imports-vllm": ("vllm_adapter.scheduler.planted", "import vllm"),
    "command-lines-alone": ("vllm_adapter.observe.planted", "import rich"),
    "command-lines-by-main": ("vllm_adapter.host.planted", "import vllm_adapter.cli"),
    "adapter-layers": ("vllm_adapter.errors", "import vllm_adapter.config"),
    "no-cycles": ("kv_handshake.errors", "import kv_handshake.planted"),
}
CLOSING = ("kv_handshake.planted", "import kv_handshake.errors")
"""The line that closes a circle."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the sources of all packages into one folder, importable before the installed ones."""
    for name in PACKAGES:
        module = name.replace("-", "_")
        shutil.copytree(ROOT / "packages" / name / "src" / module, tmp_path / "src" / module)
    return tmp_path / "src"


def lint(folder: Path) -> str:
    command = [f"{Path(sys.executable).parent}/lint-imports", "--no-logo", "--no-cache", f"--config={CONFIG}"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_the_sources_as_they_are_break_nothing_and_every_violation_is_refused(copy: Path) -> None:
    assert VIOLATIONS.keys() == CONTRACTS.keys()
    report = lint(copy)
    assert [name for name in CONTRACTS.values() if f"{name} KEPT" not in report] == [], report
    for module, line in (*VIOLATIONS.values(), CLOSING):
        path = copy.joinpath(*module.split("."))
        with (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).open("a") as file:
            file.write(f"\n{line}  # planted\n")
    report = lint(copy)
    details = report.partition("Broken contracts")[2]
    for contract, (module, line) in VIOLATIONS.items():
        name = CONTRACTS[contract]
        assert f"{name} BROKEN" in report, report
        part = re.search(rf"^{re.escape(name)}\n-+\n(.*?)(?=\n-+\n|\Z)", details, re.MULTILINE | re.DOTALL)
        assert part is not None, report
        for end in (module, line):  # of a cycle, it names modules by their last parts
            assert end.rpartition(".")[2].removeprefix("import ") in part.group(1), report
