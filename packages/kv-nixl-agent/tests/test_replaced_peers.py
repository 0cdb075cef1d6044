"""Peers that are replaced while their reads are on the way, on the fake fabric."""

from helpers import make_pair, order

from kv_nixl_agent import TransferAgent


def test_a_stopped_peer_replaced_under_its_name_leaves_its_reads_in_quarantine():
    pair = make_pair()
    pair.connect()
    pair.run(3)
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
    pair = make_pair()
    pair.connect()
    pair.run(3)
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
    pair.consumer.remove_peer("p")
    assert pair.ports[1].peers == {"producer"}, "NIXL keeps it loaded for its return"
    pair.consumer.close()
    assert pair.ports[1].peers == set()
