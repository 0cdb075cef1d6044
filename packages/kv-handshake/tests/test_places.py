"""Places of a client: hosts that keep silent, however many and at whatever stage, keep no other host out for long."""

import contextlib
import socket
import threading
import time

import pytest
import zmq

from kv_handshake import Client, Listener, LocalOffer, Timing
from kv_handshake.net import loop
from kv_handshake.testing import sample_envelopes

PLACES = 8
HOSTS = [f"127.0.{number // 200}.{number % 200 + 2}" for number in range(3 * PLACES)]


@contextlib.contextmanager
def accepting():
    """Hosts that accept and say nothing."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((host, 0))) for host in HOSTS]
        yield [server.getsockname()[:2] for server in servers]


@contextlib.contextmanager
def opening():
    """Hosts that open the connection, and answer no query."""
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        servers = [stack.enter_context(context.socket(zmq.ROUTER)) for _ in HOSTS]
        for server in servers:
            server.linger = 0
        yield [(host, server.bind_to_random_port(f"tcp://{host}")) for host, server in zip(HOSTS, servers, strict=True)]


@contextlib.contextmanager
def unresolved():
    """Names that take long to look up."""
    is_over = threading.Event()
    real = socket.getaddrinfo

    def lookup(host, *words, **named):
        if host.startswith("slow"):
            is_over.wait(20)
        return real("127.0.0.1", *words, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lookup)
        yield [(f"slow-{number}.test", 1) for number in range(len(HOSTS))]
        is_over.set()


@pytest.mark.parametrize("stages", [[accepting], [opening], [unresolved], [accepting, opening, unresolved]])
@pytest.mark.parametrize("each_asked", [1, 2])
def test_silent_hosts_keep_no_other_out(stages, each_asked):
    timing = Timing(connections=PLACES, deadline_s=20, attempt_s=15)
    listener = Listener("127.0.0.1", 0, payloads=sample_envelopes([(0, 0)]))
    listener.start()
    client = Client(LocalOffer(policy="off"), timing=timing)
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(stage()) for stage in stages]
        for number in range(each_asked):
            for host, port in [address for addresses in zip(*places, strict=True) for address in addresses][
                : len(HOSTS)
            ]:
                client.request(
                    host=host, port=port, ranks=[(0, 0)], engine_id=f"e{number}", dialect=14, on_done=lambda _: None
                )
        outcome = client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)], dialect=14)
        assert outcome.is_ok, outcome
        assert outcome.elapsed_s < 12, "half a second for each round of the places is 3 s at most"
        client.close()
    listener.close()


@pytest.mark.full
def test_hosts_that_answer_keep_their_places(monkeypatch):
    """Only silence costs a place: hosts that answer steadily end what they began, while others wait for places."""
    monkeypatch.setattr(loop, "_PATIENCE_S", 2.0)
    ranks = [(0, rank) for rank in range(6)]
    ends = []
    done = threading.Event()

    def note(outcome):
        ends.append((outcome.code, outcome.attempts))
        if len(ends) == 4:
            done.set()

    def slowly(respond):
        def answer(query, **facts):
            time.sleep(0.5)
            return respond(query, **facts)

        return answer

    client = Client(LocalOffer(policy="off"), timing=Timing(connections=2, deadline_s=40, attempt_s=20, pipeline=1))
    with contextlib.ExitStack() as stack:
        for host in HOSTS[:4]:
            listener = Listener(host, 0, payloads=sample_envelopes(ranks))
            monkeypatch.setattr(listener._core, "respond", slowly(listener._core.respond))
            listener.start()
            stack.callback(listener.close)
            client.request(host=host, port=listener.port, ranks=ranks, engine_id="", dialect=14, on_done=note)
        assert done.wait(40)
        client.close()
    assert ends == [("", 1)] * 4
