"""Close agents in the middle of reads: `python closing_midway.py TRANSPORT COUNT`, exit status 0 if the process survives."""

from __future__ import annotations

import sys

import numpy as np

from kv_nixl_agent import AgentOptions, BackendOptions, PeerSpec, TransferAgent, TransferOrder
from kv_nixl_agent.testing import PeerProcess

PAGE_BYTES, PAGES = 1 << 20, 128


def close_midway(producer: PeerProcess, number: int, transport: BackendOptions) -> str:
    """Open an agent, close it right after a read was posted, and return how the read ended."""
    memory = np.zeros((PAGES, PAGE_BYTES), dtype=np.uint8)
    options = AgentOptions(backends=(transport,))
    agent = TransferAgent(f"reader-{number}", [(memory.ctypes.data, memory.nbytes, 0, "DRAM")], options)
    rows = np.array([[memory.ctypes.data, PAGE_BYTES, 0, PAGE_BYTES, PAGES]], dtype=np.uint64)
    agent.add_peer(PeerSpec("p", producer.agent_metadata, rows, producer.rows, fence=producer.fence))
    pages = np.random.default_rng(number).permutation(PAGES).astype(np.int32)
    agent.post(TransferOrder("r", "p", local_indices=pages, peer_indices=pages))
    agent.advance()
    agent.close()
    (result,) = agent.take_results()
    return result.outcome


if __name__ == "__main__":
    transport = BackendOptions(engine_config={"TLS": sys.argv[1]} if sys.argv[1] != "default" else {})
    producer = PeerProcess("producer", page_bytes=PAGE_BYTES, page_count=PAGES, backend=transport)
    try:
        print(*(close_midway(producer, number, transport) for number in range(int(sys.argv[2]))))
    finally:
        producer.close()
