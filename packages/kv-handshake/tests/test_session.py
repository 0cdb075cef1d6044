"""A handshake without sockets: its sessions, piped into the server core, and its attempts, retries and outcomes."""

from functools import partial

import msgspec
import pytest
from handshake_helpers import FACTORS
from hypothesis import given
from hypothesis import strategies as st

from kv_handshake import Codec, ConfigurationError, LocalOffer, Timing, WireError
from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.core.handshake import Handshake
from kv_handshake.core.server import ServerCore
from kv_handshake.core.session import ClientSession
from kv_handshake.testing import sample_envelopes, sample_metadata
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.factors import compatibility_hash
from kv_handshake.wire.limits import MAX_HANDSHAKE_BYTES
from kv_handshake.wire.messages import Envelope
from kv_handshake.wire.policy import judge
from kv_handshake.wire.replies import decode_envelope, encode_clock

RANKS = [(0, 0), (0, 1), (0, 2)]


def session(ranks=RANKS, version=14, **arguments):
    return ClientSession(LocalOffer(factors=FACTORS), ranks, dialect=version, **arguments)


def ask_all(asker, core, *, ahead=1, now_s=1.0):
    """Pipe a session into a core, with `ahead` queries under way."""
    replies: list[tuple[bytes, ...]] = []
    while not asker.is_over:
        while asker.queries_left and len(replies) < ahead:
            replies.append(core.respond(asker.next_query(now_s=now_s), clock_s=100.0))
        asker.receive_message(replies.pop(0), now_s=now_s + 0.5)


@pytest.mark.parametrize("version", range(2, 16))
@pytest.mark.parametrize("ahead", [1, 3])
def test_all_ranks_in_every_dialect(version, ahead):
    asker = session(version=version, engine_id="engine-a", generation=1)
    ask_all(asker, ServerCore(sample_envelopes(RANKS, dialect=version)), ahead=ahead)
    assert asker.error is None
    assert asker.is_over
    assert {rank: peer.device_id for rank, peer in asker.peers.items()} == {(0, 0): 0, (0, 1): 1, (0, 2): 2}
    assert asker.rtt_s == 0.5
    assert asker.clock_offset_s == (None if version < 5 else 100.0 - 1.25)
    assert asker.missing_ranks == ()
    assert asker.queries_left == 0
    assert asker.verdict.is_accepted


def test_shortest_round_trip_sets_the_clock():
    core = ServerCore(sample_envelopes(RANKS))
    asker = session()
    for sent_s, took_s, clock_s in ((0.0, 5.0, 50.0), (10.0, 1.0, 60.5), (20.0, 3.0, 99.0)):
        query = asker.next_query(now_s=sent_s)
        asker.receive_message(core.respond(query, clock_s=clock_s), now_s=sent_s + took_s)
    assert (asker.rtt_s, asker.clock_offset_s) == (1.0, 60.5 - 10.5)


def fails(frames, code, *, asked=1, **arguments):
    asker = session(**arguments)
    for _ in range(asked):
        asker.next_query(now_s=0.0)
    asker.receive_message(frames, now_s=1.0)
    assert asker.is_over
    assert asker.error.code == code
    assert asker.queries_left == 0
    return asker


def good(rank=(0, 0), **arguments):
    return (sample_envelopes([rank], **arguments)[rank], encode_clock(5.0))


def test_unexpected_replies():
    fails((), "unexpected-reply")
    fails((*good(), b"third"), "unexpected-reply")
    fails(good()[:1], "unexpected-reply")
    fails(good(dialect=4), "unexpected-reply", version=4)


def test_damaged_replies():
    fails((b"", b""), "malformed-envelope")
    fails((good()[0], b""), "malformed-clock")
    fails((bytes(17 * 1024 * 1024),), "oversized-reply")
    assert fails(good(rank=(0, 1)), "rank-mismatch").missing_ranks == tuple(RANKS)


def with_replies(ranks, reply_bytes):
    """Give each rank a reply of about so many bytes, until the session ends."""
    asked = [(0, rank) for rank in range(ranks)]
    asker = session(ranks=asked)
    for rank in asked:
        if asker.is_over:
            break
        asker.next_query(now_s=0.0)
        metadata = {**sample_metadata(), "agent_metadata": bytes(reply_bytes)}
        envelope = Codec().encode_envelope(metadata, FACTORS, dialect=14, rank=rank)
        asker.receive_message((envelope, encode_clock(0.0)), now_s=1.0)
    return asker


@pytest.mark.parametrize(("ranks", "reply_bytes"), [(17, 4_000_000), (68, 1_000_000), (4096, 16_384)])
def test_the_replies_of_a_handshake_have_so_many_bytes_in_all(ranks, reply_bytes):
    asker = with_replies(ranks, reply_bytes)
    assert asker.error.code == "oversized-reply"
    assert sum(len(peer.agent_metadata) for peer in asker.peers.values()) <= MAX_HANDSHAKE_BYTES


@pytest.mark.parametrize(("ranks", "reply_bytes"), [(64, 300_000), (200, 300_000), (4096, 10_000)])
def test_large_honest_engines_are_accepted(ranks, reply_bytes):
    asker = with_replies(ranks, reply_bytes)
    assert (asker.error, len(asker.peers)) == (None, ranks)


def test_wrong_engine_and_generation():
    fails(good(), "engine-mismatch", engine_id="engine-b")
    fails(good(), "generation-mismatch", generation=2)


def test_ranks_of_two_lives_are_not_mixed():
    changes = {"generation": 2}, {"generation": None}, {"engine_id": "other"}, {"engine_id": "other", "generation": 2}
    for change in changes:
        asker = session()
        asker.next_query(now_s=0.0)
        asker.next_query(now_s=0.0)
        asker.receive_message(good(), now_s=1.0)
        second = Codec().encode_envelope({**sample_metadata(), **change}, FACTORS, dialect=14, rank=(0, 1))
        asker.receive_message((second, encode_clock(5.0)), now_s=1.0)
        assert asker.error.code == ("engine-mismatch" if "engine_id" in change else "generation-mismatch")


def test_mismatch_names_factors():
    asker = fails(good(factors={**FACTORS, "dtype": "torch.float16"}), "hash-mismatch")
    assert asker.error.context["names"] == ("dtype",)


@pytest.mark.parametrize("changed", [{"vllm_version": "0.32.1"}, {"attn_backend_name": "TRITON_ATTN"}, {}])
def test_factors_by_which_a_bare_hash_is_explained_are_taken_for_the_peers(changed):
    names = dialect_of(14).hash_factors
    local = {**dict.fromkeys(names, "x"), "vllm_version": "0.32.0", "nixl_connector_version": 14}
    offer = LocalOffer(factors={**local, "model_weights": "ours"}, policy="negotiated")
    theirs = compatibility_hash({**local, **changed})
    ours = decode_envelope(good()[0])
    bare = Envelope(compatibility_hash=theirs, agent_metadata_bytes=ours.agent_metadata_bytes)
    asker = ClientSession(offer, [(0, 0)], dialect=14)
    asker.next_query(now_s=0.0)
    asker.receive_message((msgspec.msgpack.encode(bare), encode_clock(5.0)), now_s=1.0)
    assert asker.error is None
    assert asker.peers[0, 0].factors == ({**local, **changed} if changed else {})


def test_nothing_happens_after_the_end():
    asker = fails((), "unexpected-reply")
    first = asker.error
    asker.fail(WireError("refused", "later"))
    asker.receive_message(good(), now_s=0.0)
    assert asker.error is first
    with pytest.raises(ConfigurationError, match="no query is left") as caught:
        asker.next_query(now_s=0.0)
    assert (caught.value.code, caught.value.fault) == ("illegal-event", "local")


@pytest.mark.parametrize("ranks", [[], [(0, 0), (0, 0)], [(0, rank) for rank in range(4097)]])
def test_ranks_must_be_some_and_distinct_and_few(ranks):
    with pytest.raises(ConfigurationError):
        session(ranks=ranks)


@given(st.data())
def test_no_sequence_of_inputs_raises(data):
    core = ServerCore(sample_envelopes(RANKS))
    asker = session()
    pending = []
    for _ in range(data.draw(st.integers(0, 20))):
        action = data.draw(st.sampled_from(["query", "reply", "junk", "fail"]))
        if action == "query" and asker.queries_left:
            pending.append(core.respond(asker.next_query(now_s=0.0), clock_s=1.0))
        elif action == "reply" and pending:
            asker.receive_message(pending.pop(0), now_s=1.0)
        elif action == "junk":
            asker.receive_message([data.draw(st.binary(max_size=20))], now_s=1.0)
        elif action == "fail":
            asker.fail(WireError("refused", "enough"))
        assert asker.is_over == (asker.error is not None or not asker.missing_ranks)


def test_values_that_python_takes_for_equal_are_judged_apart():
    offer = LocalOffer(factors={"model": "m", "extra": 1})
    hashed = compatibility_hash({"model": "m", "extra": 1})
    same, other = (
        Envelope(compatibility_hash=hashed, agent_metadata_bytes=b"", factors={"model": "m", "extra": value})
        for value in (1, True)
    )
    assert same == other
    assert judge(offer, same, 14).is_accepted
    assert judge(offer, other, 14).code == "factors-differ"


def test_bytes_before_the_first_query_are_the_callers_fault():
    error = fails(good(), "illegal-event", asked=0).error
    assert error.fault == "local"


def test_bytes_that_answer_no_query_are_the_peers_fault():
    core = ServerCore(sample_envelopes(RANKS))
    asker = session()
    reply = core.respond(asker.next_query(now_s=0.0), clock_s=1.0)
    asker.receive_message(reply, now_s=1.0)
    assert not asker.is_over
    asker.receive_message(reply, now_s=1.0)
    assert (asker.error.code, asker.error.fault) == ("unexpected-reply", "peer")


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
    assert made.session.error.message == (
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
