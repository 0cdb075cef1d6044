"""Makes the modules beside the tests importable, and kv-topology's byte oracle."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

from vllm_adapter.observe import status_socket

settings.register_profile("noisy-machine", deadline=None)
settings.load_profile("noisy-machine")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "kv-topology" / "tests" / "proof"))


@pytest.fixture
def no_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep real engines of this machine out of sight; return the folder that engines and commands use here."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(status_socket, "_TEMPORARY", tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    return tmp_path / "vllm-adapter"
