"""A real client and a real listener, over loopback TCP."""

import threading

import pytest

from kv_handshake import Client, Codec, Listener, LocalOffer, Timing

FACTORS = {"model": "m", "dtype": "torch.bfloat16", "num_kv_heads": 8}
METADATA = {
    "engine_id": "engine-a",
    "agent_metadata": b"blob",
    "kv_caches_base_addr": [4096, 8192],
    "device_id": 0,
    "num_blocks": 10,
    "block_lens": [512, 512],
    "kv_cache_layout": "HND",
    "block_size": 16,
    "ssm_sizes": (0, 0),
    "attn_backend_name": "CPU_ATTN",
    "generation": 3,
    "fence": (4096, 0, 8),
    "geometry": b"document",
}
QUICK = Timing(deadline_s=3.0, attempt_s=0.5, retry_first_s=0.02, retry_most_s=0.1, hold_first_s=0.2)


def envelopes(dialect, ranks, **changes):
    codec = Codec()
    return {rank: codec.encode_envelope({**METADATA, **changes}, FACTORS, dialect=dialect, rank=rank) for rank in ranks}


@pytest.fixture
def listener():
    with_ranks = [(0, rank) for rank in range(8)]
    served = Listener("127.0.0.1", 0, payloads=envelopes(14, with_ranks))
    served.start()
    yield served
    served.close()


@pytest.fixture
def client():
    made = Client(LocalOffer(factors=FACTORS), timing=QUICK)
    yield made
    made.close()


def test_client_gets_all_ranks(listener, client):
    ranks = [(0, rank) for rank in range(8)]
    outcome = client.fetch(host="127.0.0.1", port=listener.port, ranks=ranks, engine_id="engine-a", dialect=14)
    assert outcome.is_ok, outcome
    assert list(outcome.peers) == ranks
    peer = outcome.peers[0, 7]
    assert peer.kv_caches_base_addr == (4096, 8192)
    assert (peer.generation, peer.fence, peer.geometry, peer.factors) == (3, (4096, 0, 8), b"document", FACTORS)
    assert outcome.clock_offset_s is not None
    assert abs(outcome.clock_offset_s) < 1.0


def test_callback_runs_once_on_the_client_thread(listener, client):
    seen = []
    done = threading.Event()

    def on_done(outcome):
        seen.append((outcome.is_ok, threading.current_thread().name))
        done.set()

    client.request(
        host="127.0.0.1", port=listener.port, ranks=[(0, 0)], engine_id="engine-a", dialect=14, on_done=on_done
    )
    assert done.wait(5)
    assert seen == [(True, "kv-handshake-client")]


def test_mismatch_names_the_factors(listener):
    client = Client(LocalOffer(factors={**FACTORS, "dtype": "torch.float16"}), timing=QUICK)
    outcome = client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)], engine_id="engine-a", dialect=14)
    client.close()
    assert outcome.code == "hash-mismatch"
    assert 'dtype: local "torch.float16", peer "torch.bfloat16"' in outcome.message
    assert outcome.context["names"] == ("dtype",)


def test_unknown_rank_is_refused_and_the_listener_lives(listener, client):
    outcome = client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 99)], engine_id="engine-a", dialect=14)
    assert (outcome.code, outcome.context["peer_code"]) == ("refused", "unknown-rank")
    assert listener.statistics()["refused.unknown-rank"] == 1
    assert listener.is_alive


def test_dead_peer_is_refused_and_remembered(client, free_port):
    first = client.fetch(host="127.0.0.1", port=free_port, ranks=[(0, 0)], engine_id="x", dialect=14)
    assert first.code == "connection-refused"
    assert f"127.0.0.1 port {free_port}" in first.message
    assert first.attempts > 1
    second = client.fetch(host="127.0.0.1", port=free_port, ranks=[(0, 0)], engine_id="x", dialect=14)
    assert second.code == "recently-failed"
    assert second.attempts == 0


def test_replace_serves_new_metadata(listener, client):
    listener.replace(envelopes(14, [(0, 0)], generation=4))
    outcome = client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)], engine_id="engine-a", dialect=14)
    assert outcome.peers[0, 0].generation == 4
