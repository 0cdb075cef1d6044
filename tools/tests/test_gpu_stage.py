"""The scope gpu as a person asks for it: run where there is a GPU, red where there is none."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvdev import gpu, testing
from kvdev.paths import ROOT
from kvdev.testing import RunOptions, run_tests


def _ran(
    monkeypatch: pytest.MonkeyPatch, *, has_gpu: bool, host: Path | None = Path("/cuda/python")
) -> list[list[Any]]:
    commands: list[list[Any]] = []

    def note_tests(
        name: str, python: Path, folder: Path, *_words: object, env: Mapping[str, str], **_more: object
    ) -> None:
        commands.append([name, python, folder.relative_to(ROOT).as_posix(), env["KVDEV_DEVICE"], env["PYTHONPATH"]])

    monkeypatch.setattr(testing, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(testing, "cuda_host", lambda: (host, "" if host else "no CUDA vLLM was found (why)"))
    monkeypatch.setattr(testing, "install_beside", lambda _uv, _python: Path("/site"))
    monkeypatch.setattr(testing, "_pytest", note_tests)
    return commands


def test_the_stage_runs_in_the_cuda_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = _ran(monkeypatch, has_gpu=True)
    assert run_tests(Path("uv"), ["gpu"], RunOptions()) == 0
    inside, here = [Path("/cuda/python"), "/site"], [Path(sys.executable), str(ROOT / "tools")]
    assert [[name, folder, device, python, path] for name, python, folder, device, path in commands] == [
        ["gpu", "integration_tests/gpu/test_gpu.py", "cuda", *inside],
        ["gpu-device", "integration_tests/gpu/device", "cuda", *inside],
        ["gpu-engines", "integration_tests/gpu/engines", "cuda", *here],
    ]


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_a_gpu_or_a_cuda_vllm_nothing_runs_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_gpu: bool
) -> None:
    commands = _ran(monkeypatch, has_gpu=has_gpu, host=None)
    assert run_tests(Path("uv"), ["gpu"], RunOptions()) == 1
    assert not commands
    said = capsys.readouterr().out
    assert f"not run: gpu ({'no CUDA vLLM was found (why)' if has_gpu else 'this machine has no NVIDIA GPU'};" in said


def test_a_python_without_a_cuda_vllm_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv(gpu.HOST_VARIABLE, str(python))
    said = f"no CUDA vLLM was found, {gpu.HOST_VARIABLE} may name its python"
    assert gpu.cuda_host() == (None, f"{said} ({python}: ModuleNotFoundError: No module named torch)")
    python.write_text("#!/bin/sh\nexit 0\n")
    assert gpu.cuda_host() == (python, "")
