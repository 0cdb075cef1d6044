"""The installed vLLM against the recorded interface: the record is true, and another version's differences are named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import vllm

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from kvdev.newest import read_record, report
from kvdev.paths import ROOT
from kvdev.seam import interface, wanted


def test_the_record_is_what_this_vllm_has() -> None:
    version, before = read_record()
    lines, _ = report(before, interface(Path(vllm.__file__).parents[1], wanted(ROOT / "typings")))
    if vllm.__version__.partition("+")[0] != version:
        pytest.skip(
            f"vLLM {vllm.__version__} is not the recorded {version}; it differs in {len(lines)}: {'; '.join(lines)}"
        )
    assert not lines
