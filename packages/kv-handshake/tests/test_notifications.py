import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_handshake import Codec, ConfigurationError
from kv_handshake._notifications import encode_heartbeats, encode_read_complete, parse_notification

REQUEST_IDS = (
    st.text(min_size=1, max_size=60)
    .filter(lambda text: not text.startswith(("HB:", "PUSH_REG:")))
    .filter(lambda text: text.encode("utf-8", "ignore").decode() == text)
)


@given(REQUEST_IDS, st.integers(1, 65_536))
def test_read_complete_survives_the_way(request_id, count):
    seen = parse_notification(encode_read_complete(request_id, count))
    assert (seen.kind, seen.request_ids, seen.reader_count) == ("read-complete", (request_id,), count)


@given(st.lists(st.text(min_size=1, max_size=40).filter(lambda text: text.encode("utf-8", "ignore").decode() == text)))
def test_heartbeats_survive_the_way(request_ids):
    found = []
    for payload in encode_heartbeats([(each, "") for each in request_ids], target_bytes=64):
        seen = parse_notification(payload)
        assert seen.kind == "heartbeat"
        found += seen.request_ids
    assert set(found) == set(request_ids)
    assert len(found) == len(set(request_ids))


@given(st.binary(max_size=200))
def test_anything_parses(payload):
    seen = parse_notification(payload)
    assert bool(seen.reason) == (seen.kind == "unknown")
    assert bool(seen.request_ids) == (seen.kind != "unknown")


def test_heartbeats_are_batched_by_bytes():
    payloads = encode_heartbeats([(f"request-{index:04}", "") for index in range(1000)], target_bytes=1000)
    assert max(map(len, payloads)) <= 1000
    assert len(payloads) < 20
    assert encode_heartbeats([]) == ()


def test_vllm_reads_our_heartbeats():
    # Its own reader splits the text after "HB:" at commas, and takes each part for an id.
    (payload,) = encode_heartbeats([("a", ""), ("b", "")])
    assert payload.decode()[3:].split(",") == ["a", "b"]


def test_huge_payload_is_not_looked_into():
    assert parse_notification(b"r" * (1024 * 1024) + b":1").reason == "oversized"
    assert parse_notification(b"r" * 5000 + b":1").reason == "bad-id"


@pytest.mark.parametrize(
    ("request_id", "count"),
    [("", 1), ("r", 0), ("r", -1), ("r", 65_537), ("HB:r", 1), ("PUSH_REG:r", 1), ("r" * 5000, 1)],
)
def test_read_complete_that_nobody_could_read_is_refused(request_id, count):
    with pytest.raises(ConfigurationError) as caught:
        encode_read_complete(request_id, count)
    assert caught.value.code == "invalid-argument"


@pytest.mark.parametrize("request_id", ["", "\ud800", "r" * 5000, "\u6f22" * 2000])
def test_heartbeat_that_nobody_could_read_is_refused(request_id):
    with pytest.raises(ConfigurationError):
        encode_heartbeats([(request_id, "")])


def test_lone_surrogate_cannot_be_notified():
    with pytest.raises(ConfigurationError):
        encode_read_complete("\ud800", 1)


def test_codec_offers_the_same():
    codec = Codec()
    assert codec.read_complete("r", 2) == b"r:2"
    assert codec.heartbeats([("r", "")]) == (b"HB:r",)
    assert codec.parse_notification(b"r:2").reader_count == 2
    assert len(codec.compatibility_hash({})) == 64
