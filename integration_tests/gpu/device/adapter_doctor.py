"""`kv-nixl doctor` by way of the adapter: a hand-over between two processes, through its own transfer threads.

    python adapter_doctor.py producer|consumer DEVICE

The producer writes its tickets to standard output, a line of JSON each, and lives until its input ends. The consumer takes
them from its input and reads. UCX prints the protocols that it uses among the consumer's lines (`TRANSPORT_ENVIRONMENT`).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "fakes")]

import torch  # noqa: E402
from engines import LAYERS, TOKENS  # noqa: E402  (of the fakes)
from torch_engine import TorchEngine  # noqa: E402  (beside this file)

READS = 12
BLOCKS = 128


def produce(device: torch.device) -> None:
    """Compute prompts, tell their tickets, and go on stepping until the consumer is done."""
    engine = TorchEngine("doctor-producer", device, blocks=READS * BLOCKS + 1)
    try:
        given = [engine.prefill(BLOCKS * TOKENS) for _ in range(READS)]
        _tell([[source, ticket] for source, ticket in given])
        sys.stdin.readline()  # the consumer is done
        engine.wait_idle()
        _tell("all blocks are free")
    finally:
        engine.close()


def consume(device: torch.device) -> None:
    """Read every prompt, compare its bytes, tell what the transfer thread counted."""
    engine = TorchEngine("doctor-consumer", device, blocks=BLOCKS + 1)
    try:
        took_s: list[float] = []
        for source, ticket in json.loads(sys.stdin.readline()):
            began_s = time.perf_counter()
            request = engine.start_decode(ticket, BLOCKS * TOKENS)
            assert engine.wait_received(request), "a read failed"
            took_s.append(time.perf_counter() - began_s)
            engine.assert_has(request, source, BLOCKS * TOKENS)
            engine.finish(request)
        read_bytes = BLOCKS * LAYERS * engine.memory[0][0][0].nbytes
        _tell(
            {
                "reads": len(took_s),
                "fence_checks": engine.fence_checks(READS)[0],
                "fences_rejected": engine.fences_rejected(),
                "first_hand_over_ms": took_s[0] * 1e3,
                "hand_over_ms": statistics.median(took_s[1:]) * 1e3,
                "megabytes": read_bytes / 1e6,
            }
        )
    finally:
        engine.close()


def _tell(value: Any) -> None:
    """Write a line that the parent finds among those of NIXL and UCX."""
    print("\nTOLD " + json.dumps(value), flush=True)


if __name__ == "__main__":
    (produce if sys.argv[1] == "producer" else consume)(torch.device(sys.argv[2]))
