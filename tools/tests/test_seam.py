"""The recorded interface of vLLM, and how another version's differences are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdev.newest import read_record, report, run_newest
from kvdev.paths import ROOT
from kvdev.seam import HOOKS, differences, interface, wanted

BASE = """
from .parts import Part as Renamed
from abc import ABC, abstractmethod

class Parent:
    def inherited(self, one): ...

class Base(Parent, ABC):
    size: int
    def __init__(self):
        self.count = 0
    @property
    def name(self): ...
    @abstractmethod
    def hook(self, one, two=1, *, three, **rest): ...
"""


def _vllm(root: Path, base: str = BASE) -> Path:
    (root / "vllm").mkdir(parents=True)
    (root / "vllm" / "__init__.py").write_text("if True:\n    from vllm.base import Base\n")
    (root / "vllm" / "base.py").write_text(base)
    (root / "vllm" / "parts.py").write_text("def Part(a, *more): ...\n")
    (root / "vllm-9.9.0.dist-info").mkdir()
    return root


NAMES = {
    "vllm:Base": ["size", "count", "name", "hook", "inherited", "never"],
    "vllm.base:Renamed": [],
    "vllm.gone:X": [],
}


def test_definitions_are_found_through_imports_and_bases(tmp_path: Path) -> None:
    assert interface(_vllm(tmp_path), NAMES) == {
        "vllm.base:Renamed": "(a, *more)",
        "vllm.gone:X": "not found",
        "vllm:Base": "class",
        "vllm:Base.count": "attribute",
        "vllm:Base.hook": "abstract (self, one, two=..., *, three, **rest)",
        "vllm:Base.inherited": "(self, one)",
        "vllm:Base.name": "attribute",
        "vllm:Base.never": "not found",
        "vllm:Base.size": "attribute",
    }


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("inherited(self, one)", "inherited(self, two)", "changed: vllm:Base.inherited: (self, one) -> (self, two)"),
        ("    size: int\n", "", "gone: vllm:Base.size (was attribute)"),
        ("class Base(", "class Other(", "gone: vllm:Base (was class)"),
        ("import Part as Renamed", "import Part", "gone: vllm.base:Renamed (was (a, *more))"),
        ("    size: int\n", "    size: int\n    never: int\n", "new: vllm:Base.never: attribute"),
    ],
)  # fmt: skip
def test_each_difference_is_named(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert old in BASE
    before = interface(_vllm(tmp_path / "old"), NAMES)
    lines, is_broken = report(before, interface(_vllm(tmp_path / "new", BASE.replace(old, new)), NAMES))
    assert line in lines
    assert is_broken is not line.startswith("new")
    assert not differences(before, before)


def test_the_record_holds_what_the_adapter_uses() -> None:
    version, record = read_record()
    assert version == "0.32.0"
    needed = wanted(ROOT / "typings")
    assert {f"{key}.{member}" for key, members in needed.items() for member in members} | set(needed) <= set(record)
    assert not [key for key, entry in record.items() if entry == "not found"]
    assert sum(key.startswith(HOOKS[0] + ".") for key in record) > 30


def test_a_vllm_that_lost_its_base_class_is_refused_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_newest(Path("uv"), version="", source=_vllm(tmp_path), record=False) == 1
    out, err = capsys.readouterr()
    said = out + err
    assert "vLLM 9.9.0 against the recorded 0.32.0" in said
    assert f"gone: {HOOKS[0]} (was class)" in said
