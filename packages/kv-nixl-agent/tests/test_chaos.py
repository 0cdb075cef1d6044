"""Random faults: first everything fails now and then, then the fabric heals and all must come to rest.

`KV_NIXL_CHAOS_TRANSFERS` sets the number of transfers: 1500 unless told otherwise, 20000 for a release.
"""

import os
import random
import resource
from typing import Any

import numpy as np
import pytest
from helpers import make_pair, order

from kv_nixl_agent import AgentError, AgentOptions

TRANSFERS = int(os.environ.get("KV_NIXL_CHAOS_TRANSFERS", "1500"))
RATES = {
    "post-error": 0.01,
    "check-error": 0.01,
    "make-error": 0.005,
    "release-error": 0.02,
    "disconnect": 0.01,
    "drop-notification": 0.02,
    "stall": 0.05,
}


def test_every_order_ends_once_and_nothing_leaks():
    options = AgentOptions(chunk_rows=8, max_inflight_bytes=64 * 64, max_quarantined_per_peer=10_000)
    pair = make_pair(pages=64, options=options, seed=3)
    pair.producer.write_fence(1, 11)
    pair.connect("p")
    random_ = random.Random(3)
    pair.fabric.fault_rates = RATES
    ordered, not_quiet, quiet = 0, set(), set()

    def collect():
        for result in pair.consumer.take_results():
            assert result.transfer_id not in pair.results
            pair.results[result.transfer_id] = result.outcome
            if not result.is_memory_quiet:
                not_quiet.add(result.transfer_id)
        for transfer_id in pair.consumer.take_quiet():
            assert transfer_id in not_quiet, "quiet twice, or never in quarantine"
            not_quiet.remove(transfer_id)
            quiet.add(transfer_id)

    memory_before = 0
    while ordered < TRANSFERS:
        size = random_.randrange(0, 24)
        ids = np.array(random_.sample(range(64), size), dtype=np.int32)
        fence = (1, random_.choice([11, 11, 11, 12])) if random_.random() < 0.5 else None
        pair.consumer.submit(
            order(f"t{ordered}", ids, ids[::-1], notification=b"x", fence=fence, deadline_s=random_.choice([0.05, 1.0]))
        )
        ordered += 1
        if random_.random() < 0.05:
            pair.consumer.cancel(f"t{random_.randrange(ordered)}")
        if random_.random() < 0.002:
            pair.fabric.fault_rates = {}
            if pair.consumer.has_peer("p"):
                pair.consumer.remove_peer("p")
            pair.connect("p")
            pair.fabric.fault_rates = RATES
        for _ in range(random_.randrange(1, 4)):
            pair.clock[0] += 0.002
            pair.consumer.advance()
        collect()
        pair.producer.take_notifications()
        if ordered == TRANSFERS // 4:
            memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pair.fabric.fault_rates = {}
    for _ in range(20_000):
        pair.clock[0] += 0.002
        pair.consumer.advance()
        collect()
        if not pair.consumer.is_busy and not pair.consumer.has_quarantine:
            break
    assert len(pair.results) == ordered
    assert set(pair.results.values()) == {"done", "failed", "fence-rejected", "timed-out", "cancelled"}
    for entry in pair.consumer.quarantine():  # only what NIXL itself cannot tell any more
        assert "lost track" in entry.last_error
    lost = {entry.transfer_id for entry in pair.consumer.quarantine()}
    collect()
    assert not_quiet == lost, "quarantine did not end although the fabric healed"
    assert quiet
    port = pair.ports[1]
    assert lost or port.open_handles()["transfer"] == 0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before
    assert grown < 20_000, f"memory grew by {grown} KiB over {TRANSFERS} transfers"
    pair.consumer.close()
    assert port.open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}
    assert port.double_releases == 0


@pytest.mark.parametrize("call", ["register", "add_peer", "prepare", "make", "post", "check"])
def test_one_failure_anywhere_leaks_nothing(call: str) -> None:
    for skip in range(6):
        pair = make_pair()
        hits = [skip]
        original = pair.fabric.hit

        def hit(name, original=original, hits=hits):
            if name == call:
                hits[0] -= 1
                if hits[0] == -1:
                    raise AgentError("nixl-backend", "injected")
            original(name)

        fabric: Any = pair.fabric
        fabric.hit = hit
        refused = None
        try:
            pair.connect()
            pair.consumer.submit(order("a", [0], [1], notification=b"n", deadline_s=0.5))
            pair.run(20, step_s=0.1)
            assert "a" in pair.results
        except AgentError as error:
            refused = error.code
        pair.fabric.hit = original
        pair.consumer.close()
        assert pair.ports[1].open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}, (call, skip)
        assert pair.ports[1].peers == set()
        assert refused in {None, "metadata-rejected", "rows-unregistered", "peer-rows-unregistered", "bad-fence"}
