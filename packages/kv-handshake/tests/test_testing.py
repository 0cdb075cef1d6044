"""The fakes pass the same checks as the real things, and the checks notice faults."""

import pytest

from kv_handshake import LocalOffer, Outcome, TransportError, WireError
from kv_handshake._endpoint import endpoint_of
from kv_handshake._outcome import outcome_of
from kv_handshake._server import ServerCore
from kv_handshake._task import HandshakeRequest, Question, Task
from kv_handshake._timing import Timing
from kv_handshake.testing import FakeClient, FakeListener, FakeNetwork, check_client, check_listener, sample_envelopes

FACTORS = {"model": "sample", "dtype": "torch.bfloat16", "num_kv_heads": 8}


def fetch_with(network, client, listener):
    def fetch(ranks, engine_id, dialect):
        ends: list[Outcome] = []
        client.request(
            host="127.0.0.1", port=listener.port, ranks=ranks, engine_id=engine_id, dialect=dialect, on_done=ends.append
        )
        assert ends == []
        assert network.run() == 1
        return ends[0]

    return fetch


def test_fakes_pass_the_checks():
    network = FakeNetwork()
    listener, client = FakeListener(network, payloads=sample_envelopes()), FakeClient(network)
    listener.start()
    check_listener(listener, lambda query: listener._core.respond(query, clock_s=1.0))
    check_client(fetch_with(network, client, listener), listener)
    assert client.statistics()["succeeded"] == 14
    other = FakeListener(network, port=listener.port)
    with pytest.raises(TransportError, match="taken"):
        other.start()
    listener.close()
    assert fetch_with(network, client, listener)([(0, 0)], "", 14).code == "connection-refused"
    client.close()


def test_checks_notice_faults():
    core = ServerCore()
    with pytest.raises(AssertionError, match="other bytes"):
        check_listener(core, lambda _: (b"always this",))

    def answers_all(query):
        frames = core.respond(query, clock_s=1.0)
        return (*frames, b"\x01") if len(frames) == 1 else frames

    with pytest.raises(AssertionError, match="frames"):
        check_listener(core, answers_all)
    network = FakeNetwork()
    listener, careless = FakeListener(network), FakeClient(network, LocalOffer(policy="off"))
    listener.start()
    with pytest.raises(AssertionError, match="another dtype"):
        check_client(fetch_with(network, careless, listener), listener)


def request(engine_id):
    question = Question(endpoint_of("host", 5600), ((0, 0), (0, 1)), engine_id, 14)
    return HandshakeRequest(question, LocalOffer(factors=FACTORS))


def task(**timing):
    return Task(request("e"), lambda _: None, timing=Timing(**timing), now_s=100.0)


def test_a_task_retries_until_its_deadline():
    made = task(deadline_s=10.0, attempt_s=4.0, retry_first_s=1.0, retry_most_s=8.0)
    made.begin_attempt(100.0)
    made.check_time(103.9)
    assert not made.session.is_over
    made.check_time(104.0)
    assert made.session.error.code == "timed-out"
    assert str(made.session.error) == (
        "no reply for rank (0, 0) from host port 5600 (after 4.00 s, attempt 1); ranks still missing: (0, 0), (0, 1)"
    )
    assert made.plan_retry(104.0, 0.0)
    assert made.next_attempt_s == 104.5
    made.begin_attempt(104.5)
    assert (made.session.is_over, made.attempt_deadline_s) == (False, 108.5)
    made.session.fail(made.transport_error("connection-lost", "lost", 109.5))
    assert not made.plan_retry(109.5, 0.5)
    outcome = outcome_of(made, 109.5)
    assert (outcome.code, outcome.attempts, outcome.elapsed_s, outcome.is_retry_safe) == (
        "connection-lost",
        2,
        9.5,
        True,
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("connection-refused", "cannot connect to host port 5600 (after 0.50 s, attempt 1); "),
        (
            "connection-lost",
            "the connection to host port 5600 ended before all replies had come (after 0.50 s, attempt 1); ",
        ),
        (
            "authentication-refused",
            "the connection to host port 5600 could not be opened: no side channel listens there",
        ),
    ],
)
def test_the_error_of_a_connection_is_a_sentence(fault, said):
    made = task()
    made.begin_attempt(100.0)
    error = made.connection_error(fault, 100.5)
    assert (error.code, error.context["host"], error.context["port"]) == (fault, "host", 5600)
    assert str(error).startswith(said)


@pytest.mark.parametrize(
    ("context", "is_retried"),
    [
        ({}, False),
        ({"peer_code": "not-ready"}, True),
        ({"peer_code": "not-ready", "retry_after_s": 100.0}, False),
        ({"peer_code": "wrong-arity"}, False),
        ({"peer_code": "of-a-later-version"}, False),
    ],
)
def test_refusals_are_retried_as_the_peer_says(context, is_retried):
    made = task()
    made.begin_attempt(100.0)
    made.session.fail(WireError("refused", "no", **context))
    assert made.plan_retry(100.0, 0.0) == is_retried


def test_success_is_not_retried():
    made = task()
    made.begin_attempt(100.0)
    core = ServerCore(sample_envelopes([(0, 0), (0, 1)]))
    made = Task(request("engine-a"), lambda _: None, timing=Timing(), now_s=0.0)
    made.begin_attempt(0.0)
    while not made.session.is_over:
        made.session.receive_message(core.respond(made.session.next_query(now_s=0.0), clock_s=1.0), now_s=0.5)
    made.check_time(1.0)
    assert not made.plan_retry(1.0, 0.0)
    assert outcome_of(made, 1.0).is_ok
    made.check_time(100.0)
    assert made.session.error is None
