"""Observations that a worker collects between two steps."""

from __future__ import annotations

from fakes import Result

from vllm_adapter.observe.recorder import Recorder


def test_bytes_are_told_by_the_backend_that_moved_them_and_never_by_a_guess() -> None:
    stats = Recorder(ucx_tls="rc,cuda_ipc")
    paths = (("UCX", "VRAM", "DRAM", 30), ("GDS", "DRAM", "DRAM", 20), ("", "DRAM", "DRAM", 10))
    stats.transfer(Result("a", bytes_moved=60, bytes_by_path=paths))
    stats.transfer(Result("b", bytes_moved=0, bytes_by_path=()))
    taken = stats.take()
    assert taken is not None
    assert taken["bytes_by_path"] == [
        ["UCX", "DRAM->VRAM", "rc,cuda_ipc", 30],
        ["GDS", "DRAM->DRAM", "", 20],
        ["unknown", "DRAM->DRAM", "", 10],
    ]
    assert stats.take() is None
