"""Verdicts that sessions share: the same as those that each session would reach alone."""

import gc

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kv_handshake import LocalOffer
from kv_handshake._judging import Judge
from kv_handshake._messages import Envelope, Refusal
from kv_handshake._policy import judge
from kv_handshake._reading import decode_envelope
from kv_handshake._repeated import Repeated
from kv_handshake.testing import sample_envelopes

FACTORS = {"model": "sample", "num_kv_heads": 1}
OFFERS = [
    LocalOffer(factors=FACTORS, policy="exact"),
    LocalOffer(factors=FACTORS, policy="negotiated", capabilities={"prompt-digest": "required"}),
    LocalOffer(factors={"model": "sample", "num_kv_heads": True}, policy="negotiated"),
    LocalOffer(factors=FACTORS, policy="off", protocol=(2, 3)),
]
ENVELOPES = st.builds(
    Envelope,
    compatibility_hash=st.sampled_from([OFFERS[0].hashes[14], OFFERS[2].hashes[14], "other", "x" * 1000]),
    agent_metadata_bytes=st.sampled_from([b"", b"one"]),
    protocol=st.sampled_from([None, (1, 1), (2, 2)]),
    rank=st.sampled_from([None, (0, 0), (0, 1)]),
    factors=st.sampled_from([{}, FACTORS, {"model": "sample", "num_kv_heads": True}, {"model": "x" * 70_000}]),
    capabilities=st.sampled_from([{}, {"prompt-digest": "supported"}, {"unknown": "required"}]),
    refusal=st.sampled_from([None, None, None, Refusal(code="not-ready")]),
)


@given(st.lists(st.tuples(ENVELOPES, st.sampled_from(OFFERS), st.sampled_from([2, 14]), st.booleans()), max_size=12))
def test_a_shared_verdict_is_the_one_that_a_session_reaches_alone(steps):
    client = Repeated()
    repeated = Repeated(client)
    session, last = Judge(OFFERS[0], 14, repeated), (OFFERS[0], 14)
    for envelope, offer, version, is_new in steps:
        if is_new or last != (offer, version):
            repeated = Repeated(client)
            session, last = Judge(offer, version, repeated), (offer, version)
        opened = decode_envelope(msgspec.msgpack.encode(envelope), repeated)
        assert session.judge(opened) == session.verdict == judge(offer, opened, version)


def test_the_second_session_of_a_client_does_not_judge_again(monkeypatch):
    client, offer, judged = Repeated(), LocalOffer(factors={"model": "sample"}, policy="exact"), []
    frame = sample_envelopes([(0, 0)], factors={"model": "sample"})[0, 0]
    monkeypatch.setattr("kv_handshake._judging.judge", lambda *args: judged.append(args) or judge(*args))
    for _ in range(3):
        repeated = Repeated(client)
        assert Judge(offer, 14, repeated).judge(decode_envelope(frame, repeated)).is_accepted
    assert len(judged) == 1


def test_no_message_lives_on_in_a_shared_verdict():
    client = Repeated()
    offer = LocalOffer(factors={"model": "sample"}, policy="exact")
    payload = msgspec.msgpack.decode(sample_envelopes([(0, 0)], factors={"model": "sample"})[0, 0])
    payload.pop("kvh_checksum")
    frame = msgspec.msgpack.encode(payload | {"agent_metadata_bytes": bytes(1_000_000)})
    repeated = Repeated(client)
    assert Judge(offer, 14, repeated).judge(decode_envelope(frame, repeated)).is_accepted
    del frame, repeated
    gc.collect()
    offers_and_claims = client.good_verdict
    assert offers_and_claims is not None
    assert len(repr(offers_and_claims[1])) < 1000
