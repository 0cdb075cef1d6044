from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_handshake import Codec, ConfigurationError
from kv_handshake.wire import notifications
from kv_handshake.wire.limits import MAX_HEARTBEAT_IDS
from kv_handshake.wire.notifications import encode_heartbeats, encode_read_complete, parse_notification

REQUEST_IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60).filter(
    lambda text: not text.startswith(Codec().reserved_prefixes)
)


@given(st.binary(max_size=200))
def test_anything_parses(payload):
    seen = parse_notification(payload)
    assert bool(seen.reason) == (seen.kind == "unknown")
    assert bool(seen.request_ids) == (seen.kind != "unknown") or seen.reason == "push-registration"


def test_a_push_registration_names_the_senders_request_if_it_can_be_read():
    body = {"request_id": "cmpl-1-0-4b5a6978", "decode_port": 1, "local_block_ids": [[1, 2]]}
    cases = {msgspec.msgpack.encode(body): ("cmpl-1-0-4b5a6978",), b"": (), b"\x80": (), b"\xc1": ()}
    cases |= {msgspec.msgpack.encode({"request_id": wrong}): () for wrong in (7, "", "x" * 5000, None)}
    for payload, named in cases.items():
        seen = parse_notification(b"PUSH_REG:" + payload)
        assert (seen.kind, seen.reason, seen.request_ids) == ("unknown", "push-registration", named)


def test_heartbeats_are_batched_by_bytes():
    payloads = encode_heartbeats([(f"request-{index:04}", "") for index in range(1000)])
    assert max(map(len, payloads)) <= 8192
    assert len(payloads) == 2
    assert encode_heartbeats([]) == ()


def test_huge_payload_is_not_looked_into():
    assert parse_notification(b"r" * (1024 * 1024) + b":1").reason == "oversized"
    assert parse_notification(b"r" * 5000 + b":1").reason == "bad-id"


@pytest.mark.parametrize(
    ("request_id", "count"),
    [("\ud800", 1), ("", 1), ("r", 0), ("r", -1), ("r", 65_537), ("HB:r", 1), ("PUSH_REG:r", 1), ("r" * 100_000, 1)],
)
def test_read_complete_that_nobody_could_read_is_refused(request_id, count):
    with pytest.raises(ConfigurationError) as caught:
        encode_read_complete(request_id, count)
    assert caught.value.code == "invalid-argument"
    assert len(str(caught.value)) < 500, "a long id is cut"


@pytest.mark.parametrize("request_id", ["", "\ud800", "r" * 5000, "\u6f22" * 2000])
def test_heartbeat_that_nobody_could_read_is_refused(request_id):
    with pytest.raises(ConfigurationError):
        encode_heartbeats([(request_id, "")])


NONCES = st.from_regex(r"[!-~]{1,64}", fullmatch=True)
CONSUMERS = st.text(st.characters(categories=("L", "N", "P")), max_size=40)


@pytest.mark.never_wrong("C6")
@given(REQUEST_IDS, NONCES, CONSUMERS, st.integers(1, 65_536))
def test_read_with_nonce_and_consumer_survives_the_way(request_id, nonce, consumer, count):
    seen = parse_notification(encode_read_complete(request_id, count, nonce=nonce, consumer=consumer))
    assert (seen.kind, seen.request_ids, seen.reader_count) == ("read-complete", (request_id,), count)
    assert (seen.nonces, seen.consumer) == ((nonce,), consumer)


@pytest.mark.never_wrong("C6")
@given(st.lists(st.tuples(REQUEST_IDS, st.just("") | NONCES)))
def test_heartbeats_with_and_without_nonces_survive_the_way(readers):
    found: list[tuple[str, str]] = []
    with patch.object(notifications, "_TARGET_BYTES", 64):
        payloads = encode_heartbeats(readers)
    for payload in payloads:
        seen = parse_notification(payload)
        assert (seen.kind, len(seen.nonces)) == ("heartbeat", len(seen.request_ids))
        found += zip(seen.request_ids, seen.nonces, strict=True)
    assert sorted(found) == sorted(set(readers))


@pytest.mark.never_wrong("C6")
def test_vllms_form_is_unchanged_without_a_nonce():
    codec = Codec()
    assert codec.read_complete("r", 2) == b"r:2"
    assert codec.heartbeats([("a", ""), ("b", "")]) == (b"HB:a,b",)
    for payload in (b"r:2", b"HB:r"):
        assert (parse_notification(payload).nonces, parse_notification(payload).consumer) == (("",), "")


def test_a_nonce_never_stands_in_vllms_form():
    codec = Codec()
    assert codec.read_complete("r", 2, nonce="n", consumer="e") == b'KVH:["r","n","e"]:2'
    assert codec.heartbeats([("a", ""), ("b", "n")]) == (b"HB:a", b'HB:,KVH:[["b","n"]]')
    assert parse_notification(b"r:2").nonces != parse_notification(codec.read_complete("r", 2, nonce="n")).nonces


def read_by_release_0_1(payload):
    """The parser of our release 0.1 (and, for well-formed texts, of vLLM): request ids of a heartbeat or of a read."""
    text = payload.decode()
    if text.startswith("HB:,") and "," in text[4:]:
        return "heartbeat", [text[4:]]
    if text.startswith("HB:"):
        return "heartbeat", text[3:].split(",")
    request_id, _, count = text.rpartition(":")
    assert count.isdigit()
    return "read-complete", [request_id]


@pytest.mark.never_wrong("C6")
def test_older_peers_find_unknown_ids_in_our_forms():
    """Nothing there raises, and no id that could be a request's own is among them."""
    read = encode_read_complete("r,1", 4, nonce="n", consumer="e")
    heartbeats = encode_heartbeats([("r1", "n"), ("r2", "n"), ("r,3", "n")])
    for payload in (read, *heartbeats):
        for request_id in read_by_release_0_1(payload)[1]:
            assert request_id.startswith("KVH:")
    assert int(read.decode().rsplit(":", 1)[1]) == 4, "vLLM takes the text behind the last colon for a number"


@pytest.mark.never_wrong("B2")
@pytest.mark.parametrize("prefix", Codec().reserved_prefixes)
@pytest.mark.parametrize("nonce", ["", "n"])
def test_ids_with_a_reserved_prefix_are_coded_refusals(prefix, nonce):
    with pytest.raises(ConfigurationError) as caught:
        Codec().read_complete(f"{prefix}x", 1, nonce=nonce)
    assert (caught.value.code, caught.value.fault) == ("invalid-argument", "local")


@pytest.mark.parametrize(
    "arguments",
    [
        *({"nonce": nonce} for nonce in ("a b", "n" * 65, "\u6f22")),
        {"consumer": "e"},
        *({"nonce": "n", "consumer": consumer} for consumer in ("a\nb", "e" * 513, "\ud800")),
    ],
)
def test_nonces_and_consumers_that_no_peer_could_read_are_refused(arguments):
    with pytest.raises(ConfigurationError) as caught:
        Codec().read_complete("r", 1, **arguments)
    assert caught.value.code == "invalid-argument"
    if "consumer" not in arguments:
        with pytest.raises(ConfigurationError):
            Codec().heartbeats([("r", arguments["nonce"])])


def plain(ids):
    return b"HB:" + b",".join(each.encode() for each in ids), ""


def ours(ids):
    pairs = ",".join(f'["{each}","n"]' for each in ids)
    return f"HB:,KVH:[{pairs}]".encode(), "n"


def spaced(ids):
    """The same JSON as another writer spaces it."""
    return ours(ids)[0].replace(b"],[", b"], ["), "n"


def with_cuts_in_ids(ids):
    """Ids that hold the characters between two pairs."""
    return ours(f"],[{each}" for each in ids)[0], "n"


def with_escapes(ids):
    return ours(ids)[0].replace(b"r", b"\\u0072"), "n"


@pytest.mark.parametrize("count", [1, 8191, 8192, 8193, 20_000])
@pytest.mark.parametrize("form", [plain, ours, spaced, with_cuts_in_ids, with_escapes])
def test_a_heartbeat_renews_the_first_requests_and_counts_the_others(form, count):
    ids = [f"r{number}" for number in range(count)]
    payload, nonce = form(ids)
    found = parse_notification(payload)
    names = ids if form is not with_cuts_in_ids else [f"],[{each}" for each in ids]
    assert found.kind == "heartbeat"
    assert found.request_ids == tuple(names[:MAX_HEARTBEAT_IDS])
    assert found.nonces == (nonce,) * min(count, MAX_HEARTBEAT_IDS)
    assert found.surplus == max(0, count - MAX_HEARTBEAT_IDS)


@pytest.mark.parametrize(
    "bad", [b"", b"{}", b'[["a"]', b'["a","n"]', b'[["a","n","x"]]', b"[1" + b",1" * 20_000 + b"]"]
)
def test_a_list_of_anything_else_is_no_heartbeat(bad):
    assert parse_notification(b"HB:,KVH:" + bad).reason == "bad-nonce"
