"""The real client over loopback: closing it, requests that it refuses, differences that it accepts."""

import socket
import threading
import time

import pytest

from kv_handshake import Client, ConfigurationError, LocalOffer, Outcome

FACTORS = {"model": "sample", "dtype": "torch.bfloat16", "num_kv_heads": 8}
RANKS = [(0, rank) for rank in range(8)]


def fetch(client, port, **changes):
    arguments = {"host": "127.0.0.1", "port": port, "ranks": RANKS, "engine_id": "engine-a", "dialect": 14}
    return client.fetch(**{**arguments, **changes})


def test_close_ends_what_is_under_way_exactly_once():
    client = Client(LocalOffer(factors=FACTORS))
    ends: list[Outcome] = []
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for _ in range(3):
            client.request(
                host="127.0.0.1", port=mute.getsockname()[1], ranks=RANKS, engine_id="", dialect=14, on_done=ends.append
            )
        time.sleep(0.1)
        client.close()
        client.close()
    assert [outcome.code for outcome in ends] == ["closed"] * 3
    with pytest.raises(ConfigurationError, match="closed"):
        fetch(client, 1)


def test_close_from_a_callback(listener):
    client = Client(LocalOffer(factors=FACTORS))
    done = threading.Event()

    def close(_):
        client.close()
        done.set()

    client.request(
        host="127.0.0.1",
        port=listener.port,
        ranks=RANKS,
        engine_id="",
        dialect=14,
        on_done=close,
    )
    assert done.wait(5)
    client.close()


@pytest.mark.parametrize(
    "changes",
    [{"host": "a b"}, {"port": 0}, {"ranks": []}, {"ranks": [(1, 0)], "dialect": 4}, {"dialect": 99}],
)
def test_bad_requests_raise_at_once(client, changes):
    with pytest.raises(ConfigurationError):
        fetch(client, **{"port": 1, **changes})
    assert client.statistics()["requests"] == 0


def test_accepted_with_differences_is_logged(listener, caplog):
    client = Client(LocalOffer(factors={**FACTORS, "dtype": "torch.float16"}, policy="off"))
    assert fetch(client, listener.port).is_ok
    client.close()
    assert "dtype" in caplog.text
