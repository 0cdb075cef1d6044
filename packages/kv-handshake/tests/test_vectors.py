"""The conformance vectors: append-only, and read correctly by this implementation and by an independent one."""

import json
from collections.abc import Callable

import msgspec
import pytest
from vector_source import DATA_FILE, HERE, LOCK_FILE, lock_line

from kv_handshake import Codec, WireError
from kv_handshake.testing import load_vectors
from kv_handshake.wire import asks
from kv_handshake.wire.asks import is_ask, parse_answer, parse_ask
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.factors import compatibility_hash
from kv_handshake.wire.notifications import encode_heartbeats, encode_read_complete, parse_notification
from kv_handshake.wire.queries import encode_query, parse_query
from kv_handshake.wire.replies import decode_clock, decode_envelope, decode_metadata, encode_clock, encode_refusal

RELEASES = json.loads((HERE / "data" / "vllm_frames.json").read_text())
VECTORS = load_vectors()
WITHDRAWN = {
    "query-advertisement",
    "refused-query-advertisement-rank",
    "advertisement",
    "stream-two-frames",
    "stream-empty-frame",
}
"""Vectors of features that release 0.3 removed: their query is refused, and their other messages are not read."""


def over(*kinds):
    """Run a test once for each vector of these kinds; a failure names the vector."""

    def decorate(test):
        def run():
            for vector in VECTORS:
                if vector.kind in kinds:
                    try:
                        test(vector)
                    except BaseException as error:
                        error.add_note(f"vector {vector.name}")
                        raise

        return run

    return decorate


def test_vectors_are_append_only():
    locked = LOCK_FILE.read_text().splitlines()
    stored = [lock_line(vector) for vector in json.loads(DATA_FILE.read_text())["vectors"]]
    assert len(locked) >= 157, "a published vector was taken out of the lock file"
    assert stored == locked, "published vectors must stay as they are; vector_source.py appends new ones"


def test_names_are_unique_and_every_kind_is_there():
    assert len({each.name for each in VECTORS}) == len(VECTORS)
    assert {each.kind for each in VECTORS} >= {"query", "refused-query", "envelope", "refusal", "hash", "notification"}
    assert {each.expect.get("dialect") for each in VECTORS if each.kind == "envelope"} == set(range(2, 16))


@over("query")
def test_query(vector):
    if vector.name in WITHDRAWN:
        with pytest.raises(WireError):
            parse_query(vector.data)
        return
    query = parse_query(vector.data)
    seen = {"command": "metadata", "pp": query.rank[0], "tp": query.rank[1], "clock": query.wants_clock}
    assert seen == vector.expect
    if vector.name.startswith("query-v"):
        version = int(vector.name.split("-")[1][1:])
        assert encode_query(query.rank, dialect_of(version)) == vector.data


@pytest.mark.parametrize("version", list(RELEASES))
def test_query_is_what_that_release_sends(version):
    (vector,) = [each for each in VECTORS if each.name == f"query-v{version}-pp0-tp3"]
    assert vector.data.hex() == RELEASES[version]["query"]


@over("ask")
def test_ask(vector):
    assert is_ask(vector.data)
    ask = parse_ask(vector.data)
    assert ask.number == vector.expect["number"]
    assert (None if ask.payload is None else ask.payload.hex()) == vector.expect["payload"]
    written = asks.encode_cancel(ask.number) if ask.payload is None else asks.encode_ask(ask.number, ask.payload)
    assert vector.name == "ask-wide" or written == vector.data
    # A listener that takes none, as those of before, refuses it.
    with pytest.raises(WireError):
        parse_query(vector.data)


@over("answer")
def test_answer(vector):
    reply = parse_answer(vector.data)
    assert {**reply._asdict(), "payload": reply.payload.hex()} == vector.expect
    refusal = asks.encode_ask_refusal(reply.number, reply.code, retry_after_s=reply.retry_after_s)
    assert vector.data == (refusal if reply.code else asks.encode_answer(reply.number, reply.payload))


@over("envelope")
def test_envelope(vector):
    envelope = decode_envelope(vector.data)
    metadata = msgspec.to_builtins(decode_metadata(envelope))
    assert envelope.compatibility_hash == vector.expect["compatibility_hash"]
    assert json.loads(json.dumps(envelope.rank)) == vector.expect.get("rank")
    assert envelope.capabilities == vector.expect.get("capabilities", {})
    renamed = {name.replace("kvh_", ""): value for name, value in metadata.items()}
    for name, value in vector.expect["metadata"].items():
        found = getattr(decode_metadata(envelope), name)
        found = found.hex() if isinstance(found, bytes) else renamed[name]
        assert json.loads(json.dumps(found)) == value, name
    if not vector.name.startswith("envelope-vllm"):
        values = msgspec.structs.asdict(decode_metadata(envelope))
        codec = Codec(capabilities=vector.expect.get("capabilities", {}))
        written = codec.encode_envelope(values, envelope.factors, dialect=vector.expect["dialect"], rank=envelope.rank)
        assert written == vector.data


@over("refusal")
def test_refusal(vector):
    refusal = decode_envelope(vector.data).refusal
    assert msgspec.to_builtins(refusal) == vector.expect
    assert vector.expect["code"] in decode_envelope(vector.data).compatibility_hash
    assert encode_refusal(refusal.code, refusal.message, retry_after_s=refusal.retry_after_s) == vector.data


@over("clock")
def test_clock(vector):
    assert decode_clock(vector.data) == vector.expect["clock_s"]
    assert vector.name == "clock-integer" or encode_clock(vector.expect["clock_s"]) == vector.data


READERS: dict[str, Callable[[bytes], object]] = {
    "refused-query": parse_query,
    "refused-ask": parse_ask,
    "refused-answer": parse_answer,
    "refused-envelope": lambda data: decode_metadata(decode_envelope(data)),
    "refused-clock": decode_clock,
}


@over(*READERS)
def test_refused(vector):
    with pytest.raises(WireError) as caught:
        READERS[vector.kind](vector.data)
    assert caught.value.code == ("unknown-command" if vector.name in WITHDRAWN else vector.expect["code"])


@over("hash")
def test_hash(vector):
    assert compatibility_hash(vector.expect["factors"]) == vector.expect["sha256"]
    assert json.loads(vector.data) == vector.expect["factors"]


@over("notification")
def test_notification(vector):
    seen = json.loads(msgspec.json.encode(parse_notification(vector.data)))
    vllms_form = {"nonces": [""] * len(seen["request_ids"]), "consumer": "", "surplus": 0}
    assert seen == vllms_form | vector.expect
    form = vector.name.removeprefix("notification-")
    if form in ("read", "read-nonce"):
        (request_id,), (nonce,) = seen["request_ids"], seen["nonces"]
        written = encode_read_complete(request_id, seen["reader_count"], nonce=nonce, consumer=seen["consumer"])
        assert written == vector.data
    elif form in ("heartbeat-one", "heartbeat-many", "heartbeat-comma", "heartbeat-nonce"):
        assert encode_heartbeats(list(zip(seen["request_ids"], seen["nonces"], strict=True))) == (vector.data,)
