"""Faults around peers that go, die or come back, each with the case that shows it. The mark names the finding."""

import gc

import pytest
from helpers import connected, order

from kv_nixl_agent import TransferAgent
from kv_nixl_agent.transfers.transfer import Transfer


@pytest.mark.never_wrong("C5")
def test_a_stalled_transfer_keeps_no_later_ones_in_memory():
    pair = connected(turns=0, latency_polls=0)
    other = TransferAgent("other", [pair.remote.region], port_factory=pair.fabric.port)
    pair.consumer.add_peer(pair.spec(other, "q"))
    pair.run(3)
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("stalled", [0], [0], deadline_s=1.0))
    for number in range(3000):
        pair.consumer.post(order(f"q{number}", [1], [1], peer="q", deadline_s=1000.0))
        pair.run(1)
    assert len(pair.results) == 3000
    gc.collect()
    alive = sum(isinstance(one, Transfer) for one in gc.get_objects())
    assert alive < 300, f"{alive} transfers are kept, and 1 is in progress"


@pytest.mark.never_wrong("C2")
def test_a_peer_that_is_dead_is_unloaded_and_a_living_one_is_kept_for_its_return():
    pair = connected()
    pair.consumer.remove_peer("p")
    assert pair.ports[1].peers == {"producer"}
    pair.connect()
    pair.fabric.agent("producer").die()
    pair.consumer.post(order("r", [0], [0]))
    assert pair.run()["r"].code == "peer-disconnected"
    pair.consumer.remove_peer("p")
    assert pair.ports[1].peers == set()
    assert pair.fabric.agent("consumer").sockets == 0


def test_a_stopped_peer_replaced_under_its_name_leaves_its_reads_in_quarantine():
    pair = connected()
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("stuck", [0], [0], deadline_s=0.1))
    pair.run(3, step_s=0.2)
    again = TransferAgent("producer", [pair.remote.region], port_factory=pair.fabric.port)
    pair.consumer.remove_peer("p")
    pair.consumer.add_peer(pair.spec(again))
    pair.consumer.post(order("new", [1], [2]))
    pair.run(10, step_s=0.1)
    assert pair.results["new"].outcome == "done"
    (entry,) = pair.consumer.quarantine()
    assert (entry.transfer_id, entry.bytes_at_risk) == ("stuck", 64)
    assert "lost track" in entry.last_error
    pair.consumer.close()
    assert pair.consumer.take_quiet() == ["stuck"]
