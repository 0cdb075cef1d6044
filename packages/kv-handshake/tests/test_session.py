"""The client's state machine: piped into the server core, and everything that can go wrong."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_handshake import Codec, ConfigurationError, LocalOffer, WireError
from kv_handshake.core.server import ServerCore
from kv_handshake.core.session import ClientSession
from kv_handshake.testing import sample_envelopes, sample_metadata
from kv_handshake.wire.factors import compatibility_hash
from kv_handshake.wire.limits import MAX_HANDSHAKE_BYTES
from kv_handshake.wire.messages import Envelope
from kv_handshake.wire.policy import judge
from kv_handshake.wire.replies import encode_clock

FACTORS = {"model": "sample", "dtype": "torch.bfloat16", "num_kv_heads": 8}
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
def test_large_honest_engines_are_met(ranks, reply_bytes):
    asker = with_replies(ranks, reply_bytes)
    assert (asker.error, len(asker.peers)) == (None, ranks)


def test_wrong_engine_and_generation():
    fails(good(), "engine-mismatch", engine_id="engine-b")
    fails(good(), "generation-mismatch", generation=2)


def test_ranks_of_two_lives_are_not_mixed():
    for change, code in (({"generation": 2}, "generation-mismatch"), ({"engine_id": "other"}, "engine-mismatch")):
        asker = session()
        asker.next_query(now_s=0.0)
        asker.next_query(now_s=0.0)
        asker.receive_message(good(), now_s=1.0)
        second = Codec().encode_envelope({**sample_metadata(), **change}, FACTORS, dialect=14, rank=(0, 1))
        asker.receive_message((second, encode_clock(5.0)), now_s=1.0)
        assert asker.error.code == code


def test_refusal_carries_the_peers_code():
    core = ServerCore(sample_envelopes([(0, 9)]))
    asker = session()
    asker.receive_message(core.respond(asker.next_query(now_s=0.0), clock_s=1.0), now_s=1.0)
    assert asker.error.code == "refused"
    assert asker.error.context["peer_code"] == "unknown-rank"
    assert asker.error.context["rank"] == (0, 0)


def test_mismatch_names_factors():
    asker = fails(good(factors={**FACTORS, "dtype": "torch.float16"}), "hash-mismatch")
    assert asker.error.context["names"] == ("dtype",)


def test_nothing_happens_after_the_end():
    asker = fails((), "unexpected-reply")
    first = asker.error
    asker.fail(WireError("refused", "later"))
    asker.receive_message(good(), now_s=0.0)
    assert asker.error is first
    with pytest.raises(ConfigurationError, match="no query is left") as caught:
        asker.next_query(now_s=0.0)
    assert (caught.value.code, caught.value.fault) == ("illegal-event", "local")


@pytest.mark.parametrize("ranks", [[], [(0, 0), (0, 0)]])
def test_ranks_must_be_some_and_distinct(ranks):
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


def test_extension_keys_of_the_wrong_type_are_refused():
    envelope = msgspec.msgpack.decode(good()[0])
    envelope["kvh_rank"] = "first"
    fails((msgspec.msgpack.encode(envelope), encode_clock(1.0)), "malformed-envelope")


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
