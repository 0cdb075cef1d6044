"""A producer whose process may open no more descriptors is met by a reader: `python starved_producer.py [tcp]`.

Prints a JSON object: how a read ended while the producer had none, and how the next one did when it had again. UCX closes the
socket on which it listens when it cannot accept a connection, so the producer stays out of reach; over TCP the reader may end.
"""

from __future__ import annotations

import json
import queue
import resource
import sys
import time
from pathlib import Path

import numpy as np

from kv_nixl_agent import AgentOptions, BackendOptions, PeerSpec, TransferResult, TransferThread
from kv_nixl_agent.testing import PeerProcess

PAGE_BYTES, PAGES = 65536, 256


def starve(pid: int) -> tuple[int, int]:
    """Let a process open nothing more; return the limits that it had. Example: 0, 1 and 3 are in use, so the limit is 2."""
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), before[1]))
    return before


def main() -> None:
    """Meet a producer without descriptors, read from it, and read again when it has some."""
    tls = {"TLS": "tcp"} if sys.argv[1:] == ["tcp"] else {}
    memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    results: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
    thread = TransferThread(
        "reader",
        [(memory.ctypes.data, memory.nbytes, 0, "DRAM")],
        on_result=results.put,
        on_notification=lambda *_: None,
        options=AgentOptions(backends=(BackendOptions(engine_config=tls),)),
    )
    thread.start()
    producer = PeerProcess("served", page_bytes=PAGE_BYTES, page_count=PAGES, engine_config=tls)
    here = np.array([[memory.ctypes.data, PAGE_BYTES, 0, PAGE_BYTES, PAGES]], np.uint64)
    spec = PeerSpec("p", producer.agent_metadata, here, producer.rows, fence=producer.fence)
    ids = np.arange(PAGES, dtype=np.int32)

    def outcome(name: str) -> str:
        thread.call_soon(lambda: thread.post_read(name, "p", ids, ids, deadline_s=5.0))
        result = results.get(timeout=20.0)
        return str(result.code or result.outcome)

    try:
        before = starve(producer.pid)
        thread.call_soon(lambda: thread.add_peer(spec))
        time.sleep(0.5)
        starved = outcome("starved")
        resource.prlimit(producer.pid, resource.RLIMIT_NOFILE, before)
        print(json.dumps({"starved": starved, "again": outcome("again")}))
    finally:
        thread.close()
        producer.close()


if __name__ == "__main__":
    main()
