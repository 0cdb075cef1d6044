"""The scope gpu as a person asks for it: recorded where there is a GPU, red where there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvdev import gpu, testing
from kvdev.cli import make_parser
from kvdev.paths import ROOT
from kvdev.steps import DevError
from kvdev.testing import GPU_PAGE, run_tests


def stage(*words: str) -> int:
    return run_tests(Path("uv"), make_parser().parse_args(["test", *words]))


def test_record_runs_the_stage_in_the_cuda_vllm_and_writes_its_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[Any]] = []

    def note_tests(
        _run: object, name: str, python: Path, folder: Path, *_words: object, env: dict[str, str], **_more: object
    ) -> None:
        ran.append([name, python, folder.relative_to(ROOT).as_posix(), env["KVDEV_DEVICE"], env["PYTHONPATH"]])

    monkeypatch.setattr(testing, "_REPORTS", tmp_path)
    monkeypatch.setattr(testing, "cuda_host", lambda: (Path("/cuda/python"), ""))
    monkeypatch.setattr(testing, "install_beside", lambda _uv, _python: Path("/site"))
    monkeypatch.setattr(testing._Run, "_pytest", note_tests)
    monkeypatch.setattr(testing, "run_step", lambda _name, command, **_more: ran.append(command))
    assert stage("gpu", "--record") == 0
    *tests, record = ran
    assert tests == [
        ["gpu", Path("/cuda/python"), "integration_tests/gpu/test_gpu.py", "cuda", "/site"],
        ["gpu-device", Path("/cuda/python"), "integration_tests/gpu/device", "cuda", "/site"],
        ["gpu-engines", Path(sys.executable), "integration_tests/gpu/engines", "cuda", str(ROOT / "tools")],
    ]
    reports = [tmp_path / f"{part}.xml" for part in ("gpu", "gpu-device", "gpu-engines")]
    assert (record[0], record[-2:]) == (Path("/cuda/python"), ["--record", GPU_PAGE])
    assert [word for word in record if word in reports] == reports


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
    assert stage("gpu", "--record") == 1
    assert f"{gpu.HOST_VARIABLE} may name its python" in capsys.readouterr().out
    assert "No module named torch" in gpu.cuda_host()[1]
    (tmp_path / "python").write_text("#!/bin/sh\nexit 0\n")
    assert gpu.cuda_host() == (tmp_path / "python", "")


def test_record_is_for_the_gpu_alone() -> None:
    with pytest.raises(DevError, match="gpu alone"):
        stage("gpu", "sim", "--record")
