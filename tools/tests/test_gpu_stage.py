"""The scope gpu where there is no GPU, or no CUDA vLLM: it fails, and names the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdev import gpu
from kvdev.cli import make_parser
from kvdev.testing import run_tests


def stage(*words: str) -> int:
    return run_tests(Path("uv"), make_parser().parse_args(["test", *words]))


def test_without_a_gpu_or_a_cuda_vllm_nothing_runs_and_the_exit_code_and_the_reason_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stage("gpu") == 1
    assert "not run: gpu (this machine has no NVIDIA GPU;" in capsys.readouterr().out
    programs = {"nvidia-smi": "exit 0", "python": "echo 'No module named torch' >&2; exit 1"}
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv(gpu.HOST_VARIABLE, str(tmp_path / "python"))
    assert stage("gpu") == 1
    assert f"{gpu.HOST_VARIABLE} may name its python" in capsys.readouterr().out
    assert "No module named torch" in gpu.cuda_host()[1]
    (tmp_path / "python").write_text("#!/bin/sh\nexit 0\n")
    assert gpu.cuda_host() == (tmp_path / "python", "")
