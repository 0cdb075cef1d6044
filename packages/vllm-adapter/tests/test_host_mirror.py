"""When blocks cross between the device and its mirror, and what happens to copies that are late or fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from vllm_adapter.worker.pages import HostMirror, PageCopy

DOCUMENT: Any = {
    "null_block": 0,
    "groups": [{"pages_per_block": 2}, {"pages_per_block": 1}],
    "regions": [
        {
            "base_address": at,
            "page_bytes": size,
            "page_stride_bytes": 64,
            "page_count": 20,
            "members": [("l", 0, group, 0)],
        }
        for at, size, group in ((3000, 64, 0), (1000, 64, 0), (1000, 64, 0), (1000, 64, 1), (5000, 48, 0))
    ],
}


class Memory:
    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.saved: list[list[PageCopy]] = []
        self.restored: list[list[PageCopy]] = []
        self.refuse_page = -1

    def mark(self) -> object:
        return "mark"

    def save(self, copies: Sequence[PageCopy], after: object) -> None:
        assert after == "mark"
        assert self.go.wait(60)
        if any(self.refuse_page in copy.pages for copy in copies):
            raise MemoryError("no room")
        self.saved.append(list(copies))

    def restore(self, copies: Sequence[PageCopy], after: object) -> None:
        assert after == "mark"
        self.restored.append(list(copies))


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def mirror(memory: Memory) -> Iterator[HostMirror]:
    mirror = HostMirror(memory, DOCUMENT)
    yield mirror
    memory.go.set()
    mirror.close()
    mirror.close()


def test_a_failed_copy_is_reported_once_and_only_for_its_request(mirror: HostMirror, memory: Memory) -> None:
    memory.refuse_page = 4
    mirror.save([("a", [[1], []]), ("b", [[2], []])])
    assert mirror.settle(["a", "b"]) == {"b": "MemoryError: no room"}
    assert mirror.settle(["b"]) == {}


def test_an_action_runs_behind_its_copies_and_never_behind_a_failed_one(mirror: HostMirror, memory: Memory) -> None:
    ran: list[str] = []
    mirror.then("nothing copied", lambda: ran.append("at once"))
    mirror.save([("a", ((1,), ()))])
    mirror.then("a", lambda: ran.append(f"a after {len(memory.saved)}"))
    memory.refuse_page = 4
    mirror.save([("b", ((2,), ()))])
    mirror.then("b", lambda: ran.append("never"))
    mirror.settle(["a", "b"])
    mirror.begin_reads()
    mirror.close()
    assert ran == ["at once", "a after 1"]
