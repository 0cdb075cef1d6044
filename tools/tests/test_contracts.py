"""Each import contract, broken once on purpose in a copy of the sources: the contract is named as broken."""

from __future__ import annotations

import os
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
VIOLATIONS: list[tuple[str, str, str]] = [
    ("libraries-are-independent", "kv_topology.errors", "import kv_handshake"),
    ("libraries-know-no-host", "kv_nixl_agent.errors", "import torch"),
    ("wiring-names-classes", "vllm_adapter.config", "import kv_scheduler_state"),
    ("handshake-third-party", "kv_handshake.errors", "import numpy"),
    ("topology-third-party", "kv_topology.errors", "import msgspec"),
    ("agent-third-party", "kv_nixl_agent.errors", "import zmq"),
    ("state-third-party", "kv_scheduler_state.errors", "import numpy"),
    ("adapter-third-party", "vllm_adapter.worker.planted", "import zmq"),
    ("pure-packages", "kv_scheduler_state.errors", "import time"),
    ("one-module-imports-zmq", "kv_handshake.errors", "import zmq"),
    ("one-module-loads-nixl", "kv_nixl_agent.errors", "import nixl"),
    ("host-room-imports-vllm", "vllm_adapter.scheduler.planted", "import vllm"),
    ("command-lines-alone", "vllm_adapter.observe.planted", "import rich.table"),
    ("command-lines-by-main", "vllm_adapter.host.planted", "import vllm_adapter.cli"),
    ("adapter-layers", "vllm_adapter.errors", "import vllm_adapter.config"),
    ("no-cycles", "kv_handshake.errors", "import kv_handshake.planted"),
]
# Line of each planted module that closes a circle.
CLOSING = {"kv_handshake.planted": "import kv_handshake.errors"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the sources of all packages into one folder, importable before the installed ones."""
    folder = tmp_path_factory.mktemp("sources")
    for name in PACKAGES:
        module = name.replace("-", "_")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "packages" / name / "src" / module, folder / module, ignore=ignored)
    for module, line in CLOSING.items():
        _file_of(folder, module).write_text(line + "\n")
    return folder


def _file_of(folder: Path, module: str) -> Path:
    path = folder.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _lint(folder: Path, *words: str) -> str:
    command: list[str | Path] = [
        Path(sys.executable).parent / "lint-imports", "--no-logo", "--config", CONFIG,
        "--cache-dir", folder.parent / "cache", *words,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    finished = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return finished.stdout + finished.stderr


@pytest.mark.parametrize(("contract", "module", "line"), VIOLATIONS, ids=lambda value: str(value).replace(" ", "-"))
def test_a_violation_is_refused_by_the_name_of_its_contract(copy: Path, contract: str, module: str, line: str) -> None:
    file = _file_of(copy, module)
    before = file.read_text() if file.exists() else None
    file.write_text((before or "") + f"\n{line}  # planted\n")
    try:
        report = _lint(copy, "--contract", contract)
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_text(before)
    assert f"{CONTRACTS[contract]} BROKEN" in report, report
    assert module.rpartition(".")[2] in report.partition("Broken contracts")[2], report


def test_the_sources_as_they_are_break_nothing(copy: Path) -> None:
    report = _lint(copy)
    for name in CONTRACTS.values():
        assert f"{name} KEPT" in report, report


def test_every_contract_is_violated_once() -> None:
    assert {contract for contract, _, _ in VIOLATIONS} == set(CONTRACTS)
