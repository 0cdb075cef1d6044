"""Queue, caps, fairness, mixed memory, deadlines and peers on the fake fabric."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import Pages, code_of, connected, make_pair, order

from kv_nixl_agent import AgentOptions, PeerSpec, TransferAgent
from kv_nixl_agent.memory.fences import FENCE_PADS


def test_peers_take_turns():
    pair = make_pair(options=AgentOptions(chunk_rows=4))
    other = TransferAgent("other", [pair.remote.region], port_factory=pair.fabric.port)
    pair.connect("p")
    pair.consumer.add_peer(pair.spec(other, "q"))
    ids = list(range(8))
    for number in range(3):
        pair.consumer.post(order(f"p{number}", ids, ids, peer="p"))
    pair.consumer.post(order("q0", ids, ids, peer="q"))
    assert list(pair.run()) == ["p0", "q0", "p1", "p2"]
    assert {result.outcome for result in pair.results.values()} == {"done"}


def test_bytes_in_flight_are_capped_and_the_queue_is_visible():
    pair = connected(options=AgentOptions(max_inflight_bytes=4 * 64, chunk_rows=2), latency_polls=3)
    for number in range(6):
        pair.consumer.post(order(f"t{number}", [0, 1, 2], [3, 4, 5]))
    assert pair.consumer.statistics()["queued_bytes"] == 6 * 3 * 64
    highest = 0
    while len(pair.results) < 6:
        pair.run(1)
        highest = max(highest, pair.consumer.statistics()["inflight_bytes"])
    assert 0 < highest <= 4 * 64
    assert pair.consumer.statistics()["queued"] == 0


def test_a_stopped_peer_that_holds_all_bytes_in_flight_delays_no_other():
    pair = connected(turns=0, options=AgentOptions(max_inflight_bytes=4 * 64, chunk_rows=2))
    other = TransferAgent("other", [pair.remote.region], port_factory=pair.fabric.port)
    pair.consumer.add_peer(pair.spec(other, "q"))
    pair.run(3)
    pair.fabric.agent("producer").stop()
    for number in range(3):
        pair.consumer.post(order(f"p{number}", [0, 1], [0, 1], peer="p", deadline_s=60.0))
    pair.run(3, step_s=0.01)
    assert pair.consumer.statistics()["inflight_bytes"] == 4 * 64  # p0 and p1: the cap is reached
    for number in range(3):
        pair.consumer.post(order(f"q{number}", [4, 5], [4, 5], peer="q", deadline_s=60.0))
    pair.run(12, step_s=0.01)
    assert {name: result.outcome for name, result in pair.results.items()} == {"q0": "done", "q1": "done", "q2": "done"}
    assert pair.consumer.statistics()["inflight_bytes"] == 4 * 64  # p2 goes on waiting
    pair.fabric.agent("producer").resume()
    pair.run(12, step_s=0.01)
    assert {pair.results[f"p{number}"].outcome for number in range(3)} == {"done"}
    assert pair.consumer.statistics()["inflight_bytes"] == 0


def test_queue_and_quarantine_are_bounded():
    pair = connected(turns=0, options=AgentOptions(max_queued=2, max_quarantined_per_peer=1))
    for number in range(2):
        pair.consumer.post(order(f"t{number}", [0], [0]))
    assert code_of(lambda: pair.consumer.post(order("t2", [0], [0]))) == "queue-full"
    pair.run()
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("stuck", [0], [0], deadline_s=0.1))
    pair.run(3, step_s=0.2)
    assert code_of(lambda: pair.consumer.post(order("next", [0], [0]))) == "quarantine-full"
    pair.fabric.agent("producer").resume()
    pair.run(3, step_s=0.2)
    pair.consumer.post(order("next", [0], [0]))
    assert pair.run()["next"].outcome == "done"


def test_a_read_that_is_done_after_its_deadline_is_void():
    pair = connected(turns=0, latency_polls=0)
    pair.consumer.post(order("late", [0], [1], deadline_s=1.0))
    pair.clock[0] += 5.0
    result = pair.run()["late"]
    assert (result.outcome, result.is_memory_quiet) == ("timed-out", True)


def test_cancel_in_the_queue_and_on_the_wire():
    pair = connected(turns=10, options=AgentOptions(chunk_rows=1), latency_polls=5)
    pair.consumer.post(order("queued", [0], [0]))
    assert pair.consumer.cancel("queued")
    pair.consumer.post(order("posted", [1], [1]))
    pair.run(1)
    assert pair.consumer.cancel("posted")
    assert not pair.consumer.cancel("posted")
    assert not pair.consumer.cancel("never")
    pair.run(20, step_s=0.01)
    assert [pair.results[name].is_memory_quiet for name in ("queued", "posted")] == [True, False]
    assert pair.consumer.take_quiet() == ["posted"]
    assert not pair.local.page(0).any()


def test_mixed_memory_kinds_are_split():
    device = Pages(8, 64)
    pair = make_pair(further_regions=[(*device.region[:3], "VRAM")])
    rows = np.concatenate([device.rows, pair.local.rows])
    peer_rows = np.concatenate([pair.remote.rows, pair.remote.rows])
    pair.consumer.add_peer(
        PeerSpec("p", pair.producer.agent_metadata(), rows, peer_rows, ["DRAM", "DRAM"], ["VRAM", "DRAM"])
    )
    pair.consumer.post(order("m", [0, 9, 1, 8], [20, 21, 22, 40], notification=b"m"))
    result = pair.run()["m"]
    assert (result.outcome, result.descriptor_count, result.is_notified) == ("done", 4, True)
    assert sorted(result.bytes_by_path) == [("UCX", "DRAM", "DRAM", 128), ("UCX", "VRAM", "DRAM", 128)]
    assert np.array_equal(device.page(0), pair.remote.page(20))
    assert np.array_equal(device.page(1), pair.remote.page(22))
    assert np.array_equal(pair.local.page(1), pair.remote.page(21))
    assert np.array_equal(pair.local.page(0), pair.remote.page(8))
    assert list(pair.producer.take_notifications()) == [("consumer", b"m")]


def test_metadata_of_another_agent_than_the_peers_is_refused():
    pair = make_pair()
    evil = pair.spec(pair.producer, "evil", agent_prefix="evil/")
    assert code_of(lambda: pair.consumer.add_peer(evil)) == "agent-name"
    assert not pair.consumer.has_peer("evil")
    pair.consumer.add_peer(pair.spec(pair.producer, "p", agent_prefix="prod"))
    assert code_of(lambda: pair.connect("q")) == "peer-known", "a name that was proved is kept"


@pytest.mark.parametrize("is_reading", [False, True])
def test_a_peer_with_its_own_agents_name_takes_it_over_from_one_that_squats_on_it(is_reading):
    pair = make_pair()
    pair.connect("squatter")
    pair.run(3)
    if is_reading:
        pair.fabric.agent("producer").stop()
        pair.consumer.post(order("held", [0], [0], peer="squatter"))
        pair.run(3)
    pair.consumer.add_peer(pair.spec(pair.producer, "p", agent_prefix="producer"))
    assert not pair.consumer.has_peer("squatter")
    if is_reading:
        pair.fabric.agent("producer").resume()
    pair.consumer.post(order("honest", [1], [2]))
    pair.run(10, step_s=0.01)
    assert pair.results["honest"].outcome == "done"
    if is_reading:
        assert pair.results["held"].code == "peer-removed"
        assert pair.consumer.statistics()["peers_retiring"] == 0


@pytest.mark.parametrize("prefix", ["", "producer"])
@pytest.mark.parametrize("is_reading", [False, True])
@pytest.mark.parametrize("first_to_go", ["p", "q"])
def test_two_keys_share_an_agent_whose_metadata_is_the_same(prefix, is_reading, first_to_go):
    pair = make_pair()
    pair.consumer.add_peer(pair.spec(pair.producer, "p", agent_prefix=prefix))
    if is_reading:
        pair.fabric.agent("producer").stop()
        pair.consumer.post(order("held", [0], [0], peer="p"))
        pair.run(3)
    pair.consumer.add_peer(pair.spec(pair.producer, "q", agent_prefix=prefix))
    if is_reading:
        pair.fabric.agent("producer").resume()
    pair.consumer.post(order("by another name", [1], [2], peer="q", notification=b"n"))
    pair.run(10, step_s=0.01)
    assert {pair.results[each].outcome for each in ("by another name", *(["held"] * is_reading))} == {"done"}
    assert list(pair.producer.take_notifications()) == [("consumer", b"n")]
    left = "q" if first_to_go == "p" else "p"
    pair.consumer.remove_peer(first_to_go)
    assert pair.consumer.statistics()["agents_waiting"] == 0
    pair.consumer.post(order("after", [3], [4], peer=left))
    pair.run(10, step_s=0.01)
    assert pair.results["after"].outcome == "done"
    pair.consumer.remove_peer(left)
    assert pair.consumer.statistics()["agents_waiting"] == 1


def test_a_failed_warm_up_leaves_the_peer():
    pair = make_pair()
    pair.fabric.fail_next("post", "nixl-disconnected")
    pair.connect()
    assert pair.consumer.peers()["p"]["is_connected"] is False
    assert pair.ports[1].open_handles()["transfer"] == 0


@pytest.mark.parametrize(
    ("code", "expected", "fault"),
    [
        ("", "", ""),
        ("nixl-disconnected", "peer-disconnected", "peer"),
        ("nixl-backend", "transfer-failed", "environment"),
        ("nixl-invalid-param", "transfer-rejected", "local"),
        ("nixl-not-found", "peer-disconnected", "peer"),
    ],
)
def test_a_fence_read_without_a_pad_waits_and_says_whose_fault_its_end_is(code, expected, fault):
    pair = connected(turns=0, latency_polls=0)
    pair.producer.write_fence(0, 3)
    fences = pair.consumer._fences
    taken: list[Any] = [fences.pads.take() for _ in range(FENCE_PADS)]
    assert fences.pads.take() is None
    pair.consumer.post(order("r", [0], [0], fence=(0, 3)))
    pair.run(3)
    assert pair.results == {}
    for pad in taken:
        fences.pads.give_back(pad)
    if code:
        pair.fabric.fail_next("make", code)
    result = pair.run()["r"]
    assert (result.outcome, result.code, result.fault) == ("failed" if code else "done", expected, fault)


def test_a_fence_word_is_read_after_the_data():
    pair = connected(turns=10, latency_polls=4)
    pair.producer.write_fence(0, 3)
    pair.consumer.post(order("r", [0], [0], fence=(0, 3)))
    pair.run(1)
    assert pair.ports[1].open_handles()["transfer"] == 1, "the data alone"
    pair.producer.write_fence(0, 4)
    assert pair.run()["r"].outcome == "fence-rejected"


def _count_calls(pair) -> list[str]:
    """Return the list that receives the name of each call of the consumer's port from now on."""
    port, calls = pair.ports[1], []
    for name in ("make", "post"):
        real = getattr(port, name)
        setattr(port, name, lambda *given, name=name, real=real: (calls.append(name), real(*given))[1])
    return calls


def test_one_read_of_words_serves_all_whose_data_is_complete_and_is_posted_again():
    pair = connected(turns=10, latency_polls=0)
    slots = {"r3": 3, "r700": 700, "r5": 5, "r511": 511, "r512": 512, "last": 4095}
    for name, slot in slots.items():
        pair.producer.write_fence(slot, 1000 + slot - (name == "r5"))
    for wanted in ("make", "post"):
        calls = _count_calls(pair)
        for name, slot in slots.items():
            pair.consumer.post(order(name, [0], [0], fence=(slot, 1000 + slot)))
        pair.run(1)
        outcomes = {name: pair.results.pop(name).outcome for name in slots}
        assert outcomes == dict.fromkeys(slots, "done") | {"r5": "fence-rejected"}
        reads = len(slots) + 3  # words 0 to 511, 512 to 1023, 3584 to 4095
        assert (calls.count("make"), calls.count("post")) == (reads if wanted == "make" else len(slots), reads)
    assert pair.consumer.peers()["p"]["outstanding"] == 3
    assert pair.consumer.statistics()["fence_pads_free"] == FENCE_PADS


def _delay_words(pair, polls):
    """Let data arrive at once, and fence words after some polls."""
    port = pair.ports[1]
    real = port.post

    def post(handle):
        pair.fabric.latency_polls = polls if handle.copies[0, 2] == 4096 else 0
        return real(handle)

    port.post = post


def _early_and_late():
    """Return a pair with the reads `early`, whose word is being read, and `late`, which is given meanwhile."""
    pair = connected(turns=10, tick_s=1e-3)
    _delay_words(pair, 8)
    for slot in (0, 1):
        pair.producer.write_fence(slot, 3)
    pair.consumer.post(order("early", [0], [0], fence=(0, 3)))
    pair.run(1)
    pair.consumer.post(order("late", [1], [1], fence=(1, 3)))
    return pair


def test_a_read_behind_each_notification_is_neither_waited_for_nor_in_the_way_of_the_next_one():
    pair = connected(turns=10, tick_s=1e-3)
    _delay_words(pair, 2)
    pair.producer.write_fence(0, 3)
    for number in range(3):
        calls = _count_calls(pair)
        pair.consumer.post(order(f"r{number}", [0], [0], notification=b"end", fence=(0, 3)))
        assert pair.run(10)[f"r{number}"].outcome == "done"
        assert calls.count("post") == 3
        assert not pair.consumer.is_busy
    pair.fabric.agent("producer").die()
    pair.consumer.post(order("late", [0], [0], notification=b"end", fence=(0, 3)))
    assert pair.run()["late"].code == "peer-disconnected"
    pair.consumer.close()
    assert pair.ports[1].open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}


def test_a_stopped_peer_answers_the_read_behind_a_notification_later():
    pair = connected(turns=10, tick_s=1e-3)
    _delay_words(pair, 20)
    pair.producer.write_fence(0, 3)
    pair.consumer.post(order("first", [0], [0], notification=b"end", fence=(0, 3)))
    while "first" not in pair.results:
        pair.run(1)
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("second", [0], [0], notification=b"end", fence=(0, 3), deadline_s=1e6))
    assert "second" not in pair.run()
    pair.fabric.agent("producer").resume()
    assert pair.run(80)["second"].outcome == "done"
    pair.consumer.remove_peer("p")
    pair.run(80)
    assert pair.consumer.statistics()["peers_retiring"] == 0


def test_words_read_before_the_end_of_the_data_prove_nothing():
    pair = _early_and_late()
    while "early" not in pair.results:
        pair.run(1)
    assert "late" not in pair.results
    pair.producer.write_fence(1, 4)
    results = pair.run()
    assert (results["early"].outcome, results["late"].outcome) == ("done", "fence-rejected")


def test_unanswered_fence_reads_leave_pads_to_other_peers():
    pair = make_pair(options=AgentOptions(max_queued=2000), tick_s=1e-4)
    other = TransferAgent("other", [pair.remote.region], port_factory=pair.fabric.port)
    pair.connect("p")
    pair.consumer.add_peer(pair.spec(other, "q", fence=other.fence))
    pair.run(5)
    other.write_fence(0, 3)
    _delay_words(pair, 8)
    for number in range(600):
        pair.consumer.post(order(f"p{number}", [0], [0], peer="p", deadline_s=5.0, fence=(number, 1)))
    pair.run(1)
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("q0", [1], [1], peer="q", fence=(0, 3)))
    assert pair.run()["q0"].outcome == "done"
    assert list(pair.results) == ["q0"]
    assert pair.consumer.statistics()["fence_pads_free"] == FENCE_PADS - 2
    pair.clock[0] += 5.0
    assert pair.run()["p0"].outcome == "timed-out"
    assert pair.consumer.statistics()["fence_pads_free"] == FENCE_PADS - 2, "NIXL may still write to them"
    pair.fabric.agent("producer").resume()
    pair.run(step_s=0.01)
    assert pair.consumer.statistics()["fence_pads_free"] == FENCE_PADS


def test_a_kept_read_of_words_gives_its_pad_to_a_peer_that_needs_one():
    pair = connected(turns=10, latency_polls=0)
    other = TransferAgent("other", [pair.remote.region], port_factory=pair.fabric.port)
    pair.consumer.add_peer(pair.spec(other, "q", fence=other.fence))
    fences = pair.consumer._fences
    while len(fences.pads.free) > 1:
        fences.pads.take()
    for number, peer in enumerate("pqpq"):
        (other if peer == "q" else pair.producer).write_fence(0, number)
        pair.consumer.post(order(f"r{number}", [0], [0], peer=peer, fence=(0, number)))
        assert pair.run(2)[f"r{number}"].outcome == "done"
    assert pair.consumer.statistics()["fence_pads_free"] == 1


def test_a_failed_read_of_words_ends_only_the_transfers_that_it_was_posted_for():
    pair = _early_and_late()
    pair.run(1)
    pair.fabric.fail_next("check", "nixl-backend")
    results = pair.run(80)
    assert (results["early"].code, results["late"].outcome) == ("transfer-failed", "done")


def test_a_probe_is_posted_when_it_is_given_and_not_in_the_next_turn():
    pair = connected(turns=10, latency_polls=0)
    pair.consumer.probe("probe", "p", deadline_s=1.0)
    assert [result.outcome for result in pair.consumer.take_results()] == ["done"]


def test_reads_beyond_all_pads_take_turns():
    pair = connected(turns=10, tick_s=1e-4, latency_polls=1)
    fences = pair.consumer._fences
    while len(fences.pads.free) > 2:
        fences.pads.take()
    for slot in range(0, 4096, 256):  # eight runs of words
        pair.producer.write_fence(slot, 3)
        pair.consumer.post(order(f"r{slot}", [0], [0], notification=b"end", fence=(slot, 3)))
    results = pair.run(20)
    assert [results[f"r{slot}"].outcome for slot in range(0, 4096, 256)] == ["done"] * 16


@pytest.mark.parametrize(("slot", "generation"), [(-1, 0), (4096, 0), (0, -1), (0, 2**64 - 1)])
def test_fence_words_have_bounds(slot, generation):
    pair = make_pair()
    assert code_of(lambda: pair.producer.write_fence(slot, generation)) == "bad-fence"


def test_no_ticket_may_name_the_generation_of_a_closed_producer():
    pair = connected(turns=10, latency_polls=0)
    pair.producer._fences.void_all()
    pair.consumer.submit(order("forged", [0], [0], fence=(0, 2**64 - 1)))
    assert pair.run()["forged"].code == "bad-fence"


def test_statistics_summarise():
    pair = connected(turns=0)
    for number in range(10):
        pair.consumer.post(order(f"t{number}", [0, 1], [2, 3], notification=b"n"))
    pair.consumer.probe("alive", "p", deadline_s=1.0)
    pair.run(step_s=0.001)
    statistics = pair.consumer.statistics()
    assert (statistics["transfers_done"], statistics["probes"], statistics["recent_count"]) == (10, 1, 10)
    assert statistics["bytes_moved"] == 20 * 64
    assert statistics["recent_wire_s_p99"] >= statistics["recent_wire_s_p50"] >= 0


def test_an_end_of_one_part_is_progress():
    pair = connected(
        turns=40, options=AgentOptions(stall_after_s=2.0, chunk_rows=1, max_inflight_bytes=64), latency_polls=6
    )
    pages = list(range(8))
    pair.consumer.post(order("slow", pages, pages, deadline_s=1000.0))
    seen = 0
    while "slow" not in pair.results:
        pair.run(1, step_s=0.25)
        seen += len(pair.consumer.stalls())
    assert pair.clock[0] - 100.0 > 4 * 2.0, "it took several times the limit"
    assert seen == 0


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_close_waits_for_a_stopped_peer_no_longer_than_allowed(wait_s, monkeypatch):
    """Under a clock of its own: only what the close itself sleeps counts, not what a busy machine adds."""
    now_s = [50.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda pause_s: now_s.append(now_s.pop() + pause_s))
    pair = connected(turns=0, options=AgentOptions(close_wait_s=wait_s))
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("stuck", [0], [0]))
    pair.consumer.advance()
    monkeypatch.setattr("kv_nixl_agent.transfers.handles.time", clock)
    pair.consumer.close()
    assert wait_s <= now_s[0] - 50.0 < wait_s + 0.01
    assert pair.consumer.take_quiet() == ["stuck"]
