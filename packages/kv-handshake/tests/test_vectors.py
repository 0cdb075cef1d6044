"""The conformance vectors: append-only, and read correctly by this implementation and by an independent one."""

import json
import math
import runpy
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kv_handshake import WireError
from kv_handshake.stream.messages import is_ask, parse_answer, parse_ask
from kv_handshake.testing import load_vectors
from kv_handshake.wire.factors import compatibility_hash
from kv_handshake.wire.notifications import parse_notification
from kv_handshake.wire.queries import parse_query
from kv_handshake.wire.replies import decode_clock, decode_envelope, decode_metadata

SOURCE = runpy.run_path(str(Path(__file__).with_name("vector_source.py")))
DATA_FILE, LOCK_FILE, RELEASES = SOURCE["DATA_FILE"], SOURCE["LOCK_FILE"], SOURCE["RELEASES"]
lock_line = SOURCE["lock_line"]
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
    assert stored == locked, "published vectors must stay as they are; run vector_source.py to append new ones"


def test_our_writers_still_write_the_published_bytes():
    published = {each.name: each.data.hex() for each in VECTORS}
    written = {each["name"]: each["hex"] for each in SOURCE["all_vectors"]()}
    assert published.keys() - written.keys() == WITHDRAWN
    assert {name: published[name] for name in written} == written


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


@pytest.mark.parametrize("version", list(RELEASES))
def test_query_is_what_that_release_sends(version):
    (vector,) = [each for each in VECTORS if each.name == f"query-v{version}-pp0-tp3"]
    assert vector.data.hex() == RELEASES[version]["query"]


@over("refused-query")
def test_refused_query(vector):
    with pytest.raises(WireError) as caught:
        parse_query(vector.data)
    assert caught.value.code == ("unknown-command" if vector.name in WITHDRAWN else vector.expect["code"])


@over("ask")
def test_ask(vector):
    assert is_ask(vector.data)
    ask = parse_ask(vector.data)
    assert ask.number == vector.expect["number"]
    assert (None if ask.payload is None else ask.payload.hex()) == vector.expect["payload"]
    # A listener that takes none, as those of before, refuses it.
    with pytest.raises(WireError):
        parse_query(vector.data)


@over("answer")
def test_answer(vector):
    reply = parse_answer(vector.data)
    assert {**msgspec.to_builtins(reply), "payload": reply.payload.hex()} == vector.expect


@over("refused-ask", "refused-answer")
def test_refused_asks_and_answers(vector):
    with pytest.raises(WireError) as caught:
        (parse_ask if vector.kind == "refused-ask" else parse_answer)(vector.data)
    assert caught.value.code == vector.expect["code"]


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


@over("refused-envelope")
def test_refused_envelope(vector):
    with pytest.raises(WireError) as caught:
        decode_metadata(decode_envelope(vector.data))
    assert caught.value.code == vector.expect["code"]


@over("refusal")
def test_refusal(vector):
    refusal = decode_envelope(vector.data).refusal
    assert msgspec.to_builtins(refusal) == vector.expect
    assert vector.expect["code"] in decode_envelope(vector.data).compatibility_hash


@over("clock")
def test_clock(vector):
    assert decode_clock(vector.data) == vector.expect["clock_s"]


@over("refused-clock")
def test_refused_clock(vector):
    with pytest.raises(WireError) as caught:
        decode_clock(vector.data)
    assert caught.value.code == "malformed-clock"


@over("hash")
def test_hash(vector):
    assert compatibility_hash(vector.expect["factors"]) == vector.expect["sha256"]
    assert json.loads(vector.data) == vector.expect["factors"]


@over("notification")
def test_notification(vector):
    seen = json.loads(msgspec.json.encode(parse_notification(vector.data)))
    vllms_form = {"nonces": [""] * len(seen["request_ids"]), "consumer": "", "surplus": 0}
    assert seen == vllms_form | vector.expect


def test_the_data_file_says_what_it_is():
    assert json.loads(DATA_FILE.read_text())["format"] == "kv-handshake-vectors"


# An independent reader, written from docs/wire alone: it shares no code with the package or with msgspec.


def unpack(data, at=0) -> tuple[Any, int]:
    """Return (value, next position) of one MessagePack value of the types that the wire uses."""
    first = data[at]
    at += 1
    if first < 0x80 or first >= 0xE0:
        return (first if first < 0x80 else first - 256), at
    if first < 0xA0:
        return unpack_items(data, at, first & 0x0F, is_map=first < 0x90)
    if first < 0xC0:
        return data[at : at + (first & 0x1F)].decode(), at + (first & 0x1F)
    if first in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[first], at
    fixed = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
    fixed |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    if first in fixed:
        (number,) = struct.unpack_from(fixed[first], data, at)
        return number, at + struct.calcsize(fixed[first])
    width = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}[first]
    count = int.from_bytes(data[at : at + width], "big")
    at += width
    if first in (0xC4, 0xC5, 0xC6):
        return data[at : at + count], at + count
    if first in (0xD9, 0xDA, 0xDB):
        return data[at : at + count].decode(), at + count
    return unpack_items(data, at, count, is_map=first in (0xDE, 0xDF))


def unpack_items(data, at, count, *, is_map) -> tuple[Any, int]:
    items = []
    for _ in range(count * 2 if is_map else count):
        item, at = unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if is_map else items), at


@over("query", "envelope", "refusal", "clock")
def test_independent_reader_agrees(vector):
    value, end = unpack(vector.data)
    assert end == len(vector.data)
    if vector.kind == "query":
        ranks = value[1:]
        assert (value[0] == b"get_meta_msg") is (vector.name not in WITHDRAWN)
        assert ranks[-1:] == ([vector.expect["tp"]] if ranks else [])
        assert (len(ranks) == 2) == vector.expect["clock"]
    elif vector.kind == "envelope":
        inner, _ = unpack(value["agent_metadata_bytes"])
        assert value["compatibility_hash"] == vector.expect["compatibility_hash"]
        for name, expected in vector.expect["metadata"].items():
            found = inner.get(name, inner.get(f"kvh_{name}", value.get(f"kvh_{name}")))
            if name in inner or f"kvh_{name}" in inner:
                assert (found.hex() if isinstance(found, bytes) else found) == expected, name
    elif vector.kind == "refusal":
        assert value["kvh_refusal"]["code"] == vector.expect["code"]
    else:
        assert math.isclose(value, vector.expect["clock_s"])
