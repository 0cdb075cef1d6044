"""The example engine on PyTorch hands over for real, and `region` reads PyTorch's own strides."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kv_topology.layouts import region

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "torch_engine.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


def shown() -> list[str]:
    page = (EXAMPLES / "README.md").read_text()
    return page.split("$ python docs/examples/torch_engine.py\n")[1].split("\n```")[0].splitlines()


@pytest.mark.full
def test_decode_goes_on_from_pages_of_another_process_and_notices_a_spoilt_one() -> None:
    """Two prompts are as the page shows them; the third one's first page is spoilt, and its continuation is another."""
    done = run("--spoil")
    said = [line for line in done.stdout.splitlines() if "NIXL" not in line]
    assert done.returncode == 1, done.stderr
    assert said[:4] == shown()[:4]
    assert (said[4] == shown()[4], said[5] == shown()[5]) == (False, True)
    assert said[6] == "ANOTHER continuation and every page of prefill is free again"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 3, 1, 2, 4), (0, 2, 1, 4, 3)])
def test_every_element_of_a_tensor_lies_where_torch_finds_it(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    sizes = {"page": 3, "kv": 2, "head": 2, "token": 4, "channel": 5}
    names = list(sizes)
    full = torch.zeros([list(sizes.values())[axis] + 1 for axis in order], dtype=dtype)
    cut = full[tuple(slice(list(sizes.values())[axis]) for axis in order)]
    cache = cut.permute([order.index(axis) for axis in range(5)])
    made = region(" ".join(names), cache, layer="a")
    part = made.members[0].layout.fields
    for place in itertools.product(*map(range, sizes.values())):
        index = dict(zip(names, place, strict=True))
        inside = sum(index[axis.name] * axis.stride_bytes for axis in part[index["kv"]].axes)
        at = made.base_address + index["page"] * made.page_stride_bytes + part[index["kv"]].offset_bytes + inside
        assert at == cache[place].data_ptr()
    assert (made.memory_kind, made.device) == ("DRAM", 0)
