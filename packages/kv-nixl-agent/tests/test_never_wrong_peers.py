"""Faults around peers that go, die or come back, each with the case that shows it. The mark names the finding."""

import gc

import pytest
from helpers import connected, make_pair, order

from kv_nixl_agent import TransferAgent
from kv_nixl_agent.transfers.transfer import Transfer


@pytest.mark.never_wrong("C5")
@pytest.mark.parametrize("when", ["on the wire", "in quarantine"])
def test_a_peer_that_is_killed_and_replaced_between_two_polls_is_found_disconnected(when):
    pair = connected()
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("r", [0], [0], deadline_s=10.0 if when == "on the wire" else 0.1))
    pair.run(3, step_s=0.2)
    pair.fabric.agent("producer").die()
    again = TransferAgent("producer", [pair.remote.region], port_factory=pair.fabric.port)
    pair.consumer.remove_peer("p")
    pair.consumer.add_peer(pair.spec(again))
    pair.run(2, step_s=0.1)
    assert pair.results["r"].code == ("peer-disconnected" if when == "on the wire" else "deadline-exceeded")
    assert pair.results["r"].is_memory_quiet is (when == "on the wire")
    assert not pair.consumer.quarantine()
    assert pair.consumer.take_quiet() == ([] if when == "on the wire" else ["r"])


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


@pytest.mark.never_wrong("C5")
@pytest.mark.parametrize("latency_polls", [0, 3])
def test_an_error_at_the_end_of_a_warm_up_leaks_neither_handle_nor_peer(latency_polls):
    pair = make_pair(latency_polls=latency_polls)
    pair.fabric.fail_next("release_prepared", "nixl-backend")
    pair.connect()
    pair.run(10)
    assert pair.consumer.peers()["p"]["outstanding"] == 0
    assert pair.ports[1].open_handles()["transfer"] == 0
    pair.consumer.remove_peer("p")
    assert pair.consumer.statistics()["peers_retiring"] == 0


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


def test_the_same_peer_known_again_while_a_read_is_on_its_way():
    pair = connected()
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("old", [0], [1]))
    pair.run(2)
    pair.consumer.remove_peer("p")
    pair.consumer.add_peer(pair.spec(pair.producer))
    pair.fabric.agent("producer").resume()
    pair.consumer.post(order("new", [2], [3]))
    pair.run(10, step_s=0.01)
    assert (pair.results["old"].code, pair.results["new"].outcome) == ("peer-removed", "done")
    assert pair.consumer.take_quiet() == ["old"]
    assert pair.consumer.statistics()["peers_retiring"] == 0
