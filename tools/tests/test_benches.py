"""Every benchmark runs to its end, tiny, and gives rows that `dev.py bench` can show; `connector` needs engines of its own."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from kvdev.paths import ROOT

FOLDER = ROOT / "tools" / "bench"
TINY: dict[str, dict[str, Any]] = {
    "handshake": {"QUERIES": 50, "ROUNDS": 2},
    "scheduler": {"ROUNDS": 1, "LIVES": 5, "LIVE": 20, "LEASES": 20},
    "seals": {},
    "topology": {"BLOCKS": (20, 200)},
    "transfer": {"STARTS": 1, "ROUNDS": 1, "SAMPLES": 1, "PAGES": {4096: 64}},
}
ARGUMENTS = {"seals": {"rounds": 2, "contacts": 1}}


def test_every_benchmark_is_tried() -> None:
    assert {file.stem for file in FOLDER.glob("[!_]*.py")} == {*TINY, "connector"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in {"handshake", "transfer"} else ()) for name in TINY]
)
def test_a_benchmark_runs_to_its_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module(name)
    for constant, value in TINY[name].items():
        monkeypatch.setattr(module, constant, value)
    rows = module.run(lambda _line: None, **ARGUMENTS.get(name, {}))
    assert rows
    for row in rows:
        assert row.keys() >= {"name", "unit", "ours", "baseline", "ratio", "target", "met"}
