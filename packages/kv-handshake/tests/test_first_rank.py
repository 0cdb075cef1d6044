"""Rank (0, 0) is asked for alone in every attempt: a listener of vLLM itself ends on a rank that it does not have."""

import contextlib
import queue
import threading
import time

import msgspec
import pytest
import zmq
from handshake_helpers import request, until
from hypothesis import given
from hypothesis import strategies as st

from kv_handshake import LocalOffer, Timing, TransportError
from kv_handshake.core.server import ServerCore
from kv_handshake.core.session import ClientSession
from kv_handshake.testing import sample_envelopes
from kv_handshake.wire.queries import parse_query

OFFER = LocalOffer(policy="off")


class FragileListener:
    """A listener that ends on a query for a rank that it does not have, as vLLM's own does.

    Attributes:
        asked: The rank of each query, by connection.
        is_dead: Whether such a query has come.
    """

    def __init__(self, ranks, *, port=0):
        self.core = ServerCore(sample_envelopes(ranks, regions=8 // len(ranks)))
        self.ranks = set(ranks)
        self.asked = {}
        self.is_dead = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.rcvtimeo = 20
        for _ in range(100):
            with contextlib.suppress(zmq.ZMQError):
                self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
                break
            time.sleep(0.02)
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while not self._stop.is_set():
            try:
                identity, empty, query = self._socket.recv_multipart()
            except zmq.Again:
                continue
            rank = parse_query(query).rank
            self.asked.setdefault(identity, []).append(rank)
            if rank not in self.ranks:
                self.is_dead = True
                break
            self._socket.send_multipart([identity, empty, *self.core.respond(query, clock_s=1.0)])
        self._context.destroy(linger=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def check_size(tp):
    """Return a check that an engine has so many ranks: each holds 8 / tp of the regions."""

    def check(first):
        if len(first.block_lens) != 8 // tp:
            raise ValueError(f"pages of {8 // len(first.block_lens)} ranks")

    return check


def ask(client, port, tp):
    outcomes = queue.SimpleQueue()
    ranks = [(0, rank) for rank in range(tp)]
    request(client, port, outcomes.put, ranks=ranks, check_first=check_size(tp))
    return outcomes.get(timeout=60)


@pytest.fixture
def client(connect):
    return connect(timing=Timing(hold_first_s=0.05, hold_most_s=0.1, deadline_s=30, attempt_s=20), seed=1)


def test_a_lie_about_the_size_is_not_asked_for_and_not_remembered(client):
    with FragileListener([(0, 0)]) as listener:
        for _ in range(3):
            outcome = ask(client, listener.port, 2)
            assert outcome.code == "first-rank-refused"
            assert "pages of 1 ranks" in outcome.message
        assert ask(client, listener.port, 1).is_ok
        time.sleep(0.3)
        assert not listener.is_dead
        assert [*listener.asked.values()] == [[(0, 0)]] * 4, "no background attempt for a ticket that lies"


def test_a_peer_that_restarts_smaller_survives_the_background_attempts(client, free_port):
    port = free_port
    with FragileListener([(0, 0), (0, 1)], port=port):
        assert ask(client, port, 2).is_ok
    assert ask(client, port, 2).code == "connection-refused"
    assert ask(client, port, 2).code == "recently-failed"
    with FragileListener([(0, 0)], port=port) as smaller:
        until(lambda: smaller.asked)
        time.sleep(0.3)
        assert [*smaller.asked.values()] == [[(0, 0)]], "one background attempt, which finds the other size"
        assert not smaller.is_dead
        assert ask(client, port, 1).is_ok


RANKS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=8, unique=True)


def sans_io(respond, ranks, **rule):
    """Run a session, with as many queries ahead as it allows; return it and the ranks in the order of asking."""
    session, asked, waiting = ClientSession(OFFER, ranks, dialect=14, engine_id="engine-a", **rule), [], []
    while not session.is_over:
        while session.queries_left:
            query = session.next_query(now_s=1.0)
            asked.append(parse_query(query).rank)
            waiting.append(query)
        session.receive_message(respond(waiting.pop(0), len(asked)), now_s=1.5)
    return session, asked


@given(RANKS, st.integers(0, 9), st.sampled_from(["good", "refusal", "other engine", "other generation", "noise"]))
def test_the_rule_changes_nothing_but_the_order(ranks, fault_at, fault):
    """With and without the rule a handshake ends alike; with it, only rank (0, 0) is asked for before its answer is there."""
    core = ServerCore(sample_envelopes([(pp, tp) for pp in range(2) for tp in range(4)]))
    checked = []

    def respond(query, _):
        frames = core.respond(query, clock_s=2.0)
        at = parse_query(query).rank
        if fault == "good" or not ranks or at != ranks[fault_at % len(ranks)]:
            return frames
        if fault == "noise":
            return (b"\xc1", *frames[1:])
        if fault == "refusal":
            return ServerCore().respond(query, clock_s=2.0)
        envelope = msgspec.msgpack.decode(frames[0])
        metadata = msgspec.msgpack.decode(envelope["agent_metadata_bytes"])
        envelope.pop("kvh_checksum")
        if fault == "other engine":
            metadata["engine_id"] = "engine-b"
        else:
            envelope["kvh_generation"] = 77
        envelope["agent_metadata_bytes"] = msgspec.msgpack.encode(metadata)
        return (msgspec.msgpack.encode(envelope), *frames[1:])

    plain, _ = sans_io(respond, ranks)
    session, asked = sans_io(respond, ranks, check_first=checked.append)
    assert asked[0] == (0, 0)
    assert sorted(asked) == sorted({*ranks, (0, 0)}) or session.error is not None
    if fault in ("good", "refusal", "noise", "other engine"):
        assert (session.error and session.error.code) == (plain.error and plain.error.code)
    if session.error is None:
        assert session.peers == plain.peers
        assert session.rtt_s == plain.rtt_s
        assert session.clock_offset_s == plain.clock_offset_s
        assert session.missing_ranks == ()
    if session.error is not None and not checked:
        assert asked == [(0, 0)]
    end = session.error
    session.fail(TransportError("timed-out", "too late"))
    assert session.error is end, "the first reason stays"
