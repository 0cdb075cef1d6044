"""Attempts of a handshake: deadlines, retries, errors and outcomes."""

import pytest

from kv_handshake import LocalOffer, WireError
from kv_handshake.core.attempt import HandshakeRequest, Question, Task, Timing, outcome_of
from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.core.server import ServerCore
from kv_handshake.testing import sample_envelopes

FACTORS = {"model": "sample", "dtype": "torch.bfloat16", "num_kv_heads": 8}


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
