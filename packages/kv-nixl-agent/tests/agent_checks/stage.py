"""A consumer under test and a producer under control: the stage on which the checks run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_nixl_agent.agent import TransferAgent
from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.nixl.port import MemoryKind
from kv_nixl_agent.tools.producer import page_pattern
from kv_nixl_agent.values import PeerSpec, TransferOrder, TransferResult

_LIMIT_S = 60.0


def count_sockets(pid: int) -> int:
    """Return how many sockets a process holds open."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += str(link.readlink()).startswith("socket:")
    return count


def _own_sockets() -> int:
    return count_sockets(os.getpid())


@dataclass
class Stage:
    """A consumer and a producer.

    Attributes:
        consumer: Agent under test, driven by `run_until`.
        producer: The other side, in this process, in another one or on a GPU, with the content `page_pattern(seed, ...)`.
        read_pages: Returns the consumer's pages, uint8 (page_count, page_bytes); a copy where they are not host
            memory.
        local_rows: A strided row over the consumer's pages, as many and as large as the producer's.
        memory_kinds: Memory kinds of (local, peer) pages.
        open_sockets: Counts the sockets that both sides hold; those of this process by default.
    """

    consumer: TransferAgent
    producer: Any
    read_pages: Callable[[], npt.NDArray[np.uint8]]
    local_rows: npt.NDArray[np.uint64]
    memory_kinds: tuple[MemoryKind, MemoryKind] = ("DRAM", "DRAM")
    open_sockets: Callable[[], int] = _own_sockets
    results: dict[str, TransferResult] = field(default_factory=dict[str, TransferResult])
    quiet: set[str] = field(default_factory=set[str])

    def spec(self, key: str = "p", *, has_fence: bool = True, **changes: object) -> PeerSpec:
        """Return the producer's description, with changes."""
        local_kind, peer_kind = self.memory_kinds
        spec = PeerSpec(
            key,
            self.producer.agent_metadata,
            self.local_rows,
            self.producer.rows,
            peer_kind,
            local_kind,
            self.producer.fence if has_fence else None,
        )
        return replace(spec, **changes)  # type: ignore[arg-type]

    def connect(self, key: str = "p", *, has_fence: bool = True) -> None:
        """Add the producer as a peer."""
        self.consumer.add_peer(self.spec(key, has_fence=has_fence))

    def read(self, transfer_id: str, local: object, peer: object, **arguments: object) -> TransferResult:
        """Read and wait for the result."""
        self.consumer.post(make_order(transfer_id, local, peer, **arguments))
        return self.wait(transfer_id)

    def wait(self, transfer_id: str, limit_s: float = _LIMIT_S) -> TransferResult:
        """Drive the consumer until a transfer has ended."""
        self.run_until(lambda: transfer_id in self.results, limit_s, f"the end of {transfer_id}")
        return self.results[transfer_id]

    def run_until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Drive the consumer until `condition`; fails after `limit_s`."""
        end_s = time.monotonic() + limit_s
        while not condition():
            expect(time.monotonic() < end_s, f"{what} did not come within {limit_s} s")
            moved = self.consumer.advance()
            for result in self.consumer.take_results():
                expect(result.transfer_id not in self.results, f"{result.transfer_id} ended twice")
                self.results[result.transfer_id] = result
            self.quiet.update(self.consumer.take_quiet())
            if not moved:
                time.sleep(20e-6)

    def await_notifications(self, count: int) -> list[tuple[str, bytes]]:
        """Wait until the producer has received `count` notifications."""
        received: list[tuple[str, bytes]] = []

        def arrived() -> bool:
            received.extend(self.producer.take_notifications())
            return len(received) >= count

        self.run_until(arrived, _LIMIT_S, f"{count} notifications")
        return received

    def expect_pages(self, seed: int, local: Sequence[int], peer: Sequence[int]) -> None:
        """Compare pages that were read with the producer's content."""
        pattern = page_pattern(seed, self.producer.page_count, self.producer.page_bytes)
        mine = self.read_pages()
        for ours, theirs in zip(local, peer, strict=True):
            expect(
                bool((mine[ours] == pattern[theirs]).all()), f"local page {ours} is not the producer's page {theirs}"
            )


def expect(holds: bool, message: str) -> None:
    """Fail a check."""
    if not holds:
        raise AssertionError(message)


def expect_error(code: str, call: Callable[[], object]) -> None:
    """Fail unless `call` raises that code."""
    try:
        call()
    except AgentError as error:
        expect(error.code == code, f"code {error.code} instead of {code}: {error}")
        return
    expect(False, f"no error instead of {code}")


def make_order(transfer_id: str, local: object, peer: object, **arguments: object) -> TransferOrder:
    """Return an order to the peer `p`."""
    fields: dict[str, object] = {"peer": "p", "deadline_s": _LIMIT_S, **arguments}
    mine, theirs = np.asarray(local, dtype=np.int32), np.asarray(peer, dtype=np.int32)
    return TransferOrder(transfer_id, local_indices=mine, peer_indices=theirs, **fields)  # type: ignore[arg-type]
