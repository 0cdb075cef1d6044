"""Attempts of a handshake: deadlines, retries, errors and outcomes."""

from functools import partial

import pytest

from kv_handshake import LocalOffer, Timing, WireError
from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.core.handshake import Handshake
from kv_handshake.core.server import ServerCore
from kv_handshake.core.session import ClientSession
from kv_handshake.testing import sample_envelopes

FACTORS = {"model": "sample", "dtype": "torch.bfloat16", "num_kv_heads": 8}


def task(outcomes=None, engine_id="e", **timing):
    new_session = partial(ClientSession, LocalOffer(factors=FACTORS), [(0, 0), (0, 1)], dialect=14, engine_id=engine_id)
    ended = [] if outcomes is None else outcomes
    return Handshake(endpoint_of("host", 5600), new_session, ended.append, timing=Timing(**timing), start_s=100.0)


def test_a_task_retries_until_its_deadline():
    outcomes = []
    made = task(outcomes, deadline_s=10.0, attempt_s=4.0, retry_first_s=1.0, retry_most_s=8.0)
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
    assert (made.is_over, made.due_s) == (False, 108.5)
    made.fail("connection-lost", "lost", 109.5)
    assert not made.plan_retry(109.5, 0.5)
    made.end(109.5)
    (outcome,) = outcomes
    assert (outcome.code, outcome.attempts, outcome.elapsed_s, outcome.is_retry_safe) == (
        "connection-lost",
        2,
        9.5,
        True,
    )


@pytest.mark.parametrize(("begun_s", "code"), [(109.0, "name-unresolved"), (106.0, "timed-out")])
def test_an_attempt_that_the_deadline_cuts_short_leaves_the_error_of_the_one_before(begun_s, code):
    made = task(deadline_s=10.0, attempt_s=4.0)
    made.begin_attempt(100.0)
    made.fail("name-unresolved", "the name has no address", 100.0)
    assert made.plan_retry(100.0, 0.0)
    made.begin_attempt(begun_s)
    made.check_time(109.9)
    assert not made.is_over
    made.check_time(110.0)
    assert made.session.error.code == code


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
    core, outcomes = ServerCore(sample_envelopes([(0, 0), (0, 1)])), []
    made = task(outcomes, "engine-a")
    made.begin_attempt(100.0)
    while (query := made.next_query(100.0)) is not None:
        made.receive(core.respond(query, clock_s=1.0), 100.5)
    assert made.is_over
    assert not made.plan_retry(101.0, 0.0)
    made.end(101.0)
    assert outcomes[0].is_ok
    made.check_time(200.0)
    assert made.session.error is None
