"""The doctor's judgement of installed NIXL packages, on folders that hold metadata as installers write it."""

from pathlib import Path

import pytest

from kv_nixl_agent.tools import machine
from kv_nixl_agent.tools.machine import check_builds

OLD13, OLD12 = ("nixl-cu13", "1.4.1"), ("nixl-cu12", "1.4.1")
CU13, CU12, META = ("nixl-cu13", "1.5.1"), ("nixl-cu12", "1.5.1"), ("nixl", "1.5.1")


def install(folder: Path, name: str, version: str, *files: str) -> None:
    """Leave what an installer leaves of a package: its metadata and the list of its files."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    listed = files or (f"{name.replace('-', '_')}/__init__.py",)
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in listed))


def install_torch(folder: Path, version: str, cuda: str | None = None, hip: str | None = None) -> None:
    install(folder, "torch", version)
    (folder / "torch").mkdir()
    (folder / "torch" / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n"
    )


def judged(folder: Path, loaded: str | None) -> dict[str, tuple[str, str]]:
    return {one.name: (one.severity, one.message) for one in check_builds(loaded, [folder])}


@pytest.mark.parametrize(
    ("packages", "severity", "words"),
    [
        ([CU13], "ok", ["nixl-cu13 1.5.1, tested"]),
        ([("nixl-cu13", "1.6.0")], "ok", ["nixl-cu13 1.6.0; accepted, but the tests ran with 1.5.1 alone"]),
        ([META, CU13], "ok", ["nixl 1.5.1, nixl-cu13 1.5.1"]),
        ([META, CU12, CU13], "ok", ["nixl-cu12 1.5.1, nixl-cu13 1.5.1", "of 2 builds nixl_cu13 is used"]),
        ([META, CU12, OLD13], "error", ["mixed versions: nixl 1.5.1, nixl-cu12 1.5.1, nixl-cu13 1.4.1"]),
        ([OLD12, CU13], "error", ["mixed versions: nixl-cu12 1.4.1, nixl-cu13 1.5.1", "uninstall the others"]),
    ],
)
def test_versions(tmp_path, packages, severity, words):
    for name, version in packages:
        install(tmp_path, name, version)
    found = judged(tmp_path, "nixl_cu13")["nixl-packages"]
    assert found[0] == severity
    assert all(word in found[1] for word in words)


def test_without_nixl_nothing_is_said_of_its_packages(tmp_path):
    install(tmp_path, "nixlab", "1.0")
    assert list(judged(tmp_path, None)) == ["nixl-cuda"]


def test_two_packages_with_one_module_are_named(tmp_path):
    install(tmp_path, *CU13)
    install(tmp_path, "My.NIXL_build", "0.9", "nixl_cu13/__init__.py", "nixl_cu13/_api.py", "README")
    severity, message = judged(tmp_path, "nixl_cu13")["nixl-owners"]
    assert severity == "error"
    assert "nixl_cu13 was installed by my-nixl-build 0.9 and nixl-cu13 1.5.1" in message


def test_a_package_that_was_overwritten_by_another_version_of_itself_is_named(tmp_path):
    install(tmp_path, *CU13)
    install(tmp_path, *OLD13)
    found = judged(tmp_path, "nixl_cu13")
    assert "nixl-cu13 1.4.1 and nixl-cu13 1.5.1" in found["nixl-owners"][1]
    assert found["nixl-packages"][0] == "error"


@pytest.mark.parametrize(("version", "is_odd"), [("1.5", False), ("1.12.0", False), ("1.4.1", True), ("2.0.0", True)])
def test_versions_that_were_never_tested(tmp_path, version, is_odd):
    install(tmp_path, "nixl-cu13", version)
    found = judged(tmp_path, "nixl_cu13")
    assert ("nixl-version" in found) is is_odd
    assert not is_odd or (found["nixl-version"][0] == "warning" and version in found["nixl-version"][1])


@pytest.mark.parametrize(
    ("cuda", "hip", "loaded", "severity", "words"),
    [
        ("13.0", None, "nixl_cu13", "ok", "CUDA 13.0, NIXL is nixl_cu13"),
        ("12.8", None, "nixl_cu12", "ok", "CUDA 12.8, NIXL is nixl_cu12"),
        ("13.0", None, "nixl_cu12", "error", "built for CUDA 13.0, but NIXL is nixl_cu12: it may not"),
        ("12.8", None, "nixl_cu13", "error", "install nixl-cu12"),
        ("13.0", None, None, "warning", "install nixl-cu13"),
        (None, "6.4", "nixl_cu12", "error", "install nixl-rocm"),
        (None, "6.4", "nixl_rocm", "ok", "ROCm 6.4"),
        (None, None, "nixl_cu12", "ok", "built without CUDA"),
    ],
)
def test_the_build_against_the_cuda_of_torch(tmp_path, monkeypatch, cuda, hip, loaded, severity, words):
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    install_torch(tmp_path, "2.13.0", cuda, hip)
    found = judged(tmp_path, loaded)["nixl-cuda"]
    assert found[0] == severity
    assert words in found[1]
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    assert judged(tmp_path, loaded)["nixl-cuda"][0] == ("warning" if severity == "error" else severity)


def test_a_torch_whose_version_file_is_damaged_is_taken_as_one_without_cuda(tmp_path):
    install_torch(tmp_path, "2.13.0", "13.0")
    (tmp_path / "torch" / "version.py").write_text("cuda = (")
    assert judged(tmp_path, "nixl_cu12")["nixl-cuda"][0] == "ok"
