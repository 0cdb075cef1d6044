"""Where the conformance vectors come from. Run it to append new ones; published ones must stay as they are.

    python packages/kv-handshake/tests/vector_source.py

Frames "as vLLM writes them" were written by the metadata classes of that release; they are in `data/vllm_frames.json`.
"""

import hashlib
import json
from pathlib import Path

import msgspec

from kv_handshake import Codec
from kv_handshake.stream.messages import encode_answer, encode_ask, encode_ask_refusal, encode_cancel
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.factors import compatibility_hash
from kv_handshake.wire.notifications import encode_heartbeats, encode_read_complete, parse_notification
from kv_handshake.wire.queries import encode_query
from kv_handshake.wire.replies import decode_envelope, decode_metadata, encode_clock, encode_refusal

HERE = Path(__file__).parent
DATA_FILE = HERE.parent / "src" / "kv_handshake" / "vectors.json"
LOCK_FILE = HERE / "data" / "vectors.lock"
RELEASES = json.loads((HERE / "data" / "vllm_frames.json").read_text())
SERVER_CODES = ("oversized-query", "malformed-query", "wrong-arity", "wrong-type", "unknown-command", "unknown-rank")
EXTENDED = {"generation": 7, "fence": (0x7F0000200000, 0, 1024), "geometry": b"geometry document"}


def pack(value):
    return msgspec.msgpack.encode(value)


def metadata_values(frame):
    return msgspec.structs.asdict(decode_metadata(decode_envelope(frame)))


def plain(values):
    """JSON form of metadata: blobs as hex."""
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()}


def queries():
    for version in range(2, 16):
        dialect = dialect_of(version)
        for rank in ((0, 0), (0, 3), (0, 200)) + (((2, 1),) if dialect.query_fields == 3 else ()):
            expect = {"command": "metadata", "pp": rank[0], "tp": rank[1], "clock": dialect.has_clock_frame}
            name = f"query-v{version}-pp{rank[0]}-tp{rank[1]}"
            meaning = f"version {version} asks for pp rank {rank[0]}, tp rank {rank[1]}"
            yield name, "query", encode_query(rank, dialect), meaning, expect
    wide = bytes.fromhex("dc0002") + b"\xc5\x00\x0cget_meta_msg" + b"\xcd\x00\x03"
    yield (
        "query-wide-integers",
        "query",
        wide,
        "the same query in wider MessagePack encodings",
        {"command": "metadata", "pp": 0, "tp": 3, "clock": False},
    )


def refused_queries():
    command = b"get_meta_msg"
    cases = (
        ("empty", b"", "malformed-query", "no byte at all"),
        ("not-msgpack", b"\xc1", "malformed-query", "a byte that MessagePack never uses"),
        ("truncated", pack((command, 3))[:-1], "malformed-query", "a query without its last byte"),
        ("trailing", pack((command, 3)) + b"\x00", "malformed-query", "a query and one byte more"),
        ("not-array", pack({"a": 1}), "malformed-query", "a map"),
        ("empty-array", pack([]), "malformed-query", "an array without fields"),
        ("array-bomb", b"\xdd\xff\xff\xff\xff", "malformed-query", "an array that promises four billion fields"),
        ("deep", b"\x91" * 200, "malformed-query", "arrays in arrays, 200 deep, and no end"),
        ("text-command", pack(("get_meta_msg", 3)), "unknown-command", "the command as text instead of bytes"),
        ("other-command", pack((b"get_something", 3)), "unknown-command", "a command that nobody knows"),
        ("no-rank", pack((command,)), "wrong-arity", "a metadata query without a rank"),
        ("four-fields", pack((command, 0, 0, 0)), "wrong-arity", "a metadata query with three ranks"),
        ("negative", pack((command, -1)), "wrong-type", "a negative rank"),
        ("float", pack((command, 0.5)), "wrong-type", "half a rank"),
        ("text-rank", pack((command, 0, "3")), "wrong-type", "a rank as text"),
        ("boolean", pack((command, True)), "wrong-type", "a boolean for a rank"),
        ("oversized", pack((command, b"x" * 300)), "oversized-query", "more than 256 bytes"),
    )
    for name, data, code, meaning in cases:
        yield f"refused-query-{name}", "refused-query", data, meaning, {"code": code}


def envelopes():
    for version, release in RELEASES.items():
        frame = bytes.fromhex(release["frame"])
        expect = {
            "dialect": int(version),
            "compatibility_hash": release["hash"],
            "metadata": plain(metadata_values(frame)),
        }
        meaning = f"an envelope as vLLM {release['release']} writes it"
        yield f"envelope-vllm-v{version}", "envelope", frame, meaning, expect
    values = metadata_values(bytes.fromhex(RELEASES["14"]["frame"])) | EXTENDED
    codec = Codec(capabilities={"fence": "supported", "streamed": "absent"})
    for version in range(2, 16):
        factors = {name: RELEASES["7"]["factors"].get(name, False) for name in dialect_of(version).hash_factors}
        factors |= {"nixl_connector_version": version, "sliding_window": 4096, "kv_cache_groups": [["full", 2]]}
        frame = codec.encode_envelope(values, factors, dialect=version, rank=(0, 3))
        expect = {
            "dialect": version,
            "compatibility_hash": decode_envelope(frame).compatibility_hash,
            "rank": [0, 3],
            "protocol": [1, 1],
            "capabilities": {"fence": "supported", "streamed": "absent"},
            "metadata": plain(metadata_values(frame)),
        }
        yield f"envelope-extended-v{version}", "envelope", frame, f"version {version} with all extension keys", expect


def envelopes_with_streams():
    values = metadata_values(bytes.fromhex(RELEASES["14"]["frame"])) | EXTENDED
    frame = Codec(capabilities={"ask": "supported"}).encode_envelope(
        values | {"streams": (0x7F0000400000, 0, 64, 8192)}, {"model": "m"}, dialect=14, rank=(0, 0)
    )
    expect = {
        "dialect": 14,
        "compatibility_hash": decode_envelope(frame).compatibility_hash,
        "rank": [0, 0],
        "protocol": [1, 1],
        "capabilities": {"ask": "supported"},
        "metadata": {name: value for name, value in plain(metadata_values(frame)).items() if name != "capabilities"},
    }
    yield "envelope-streams-v14", "envelope", frame, "version 14 with stream memory; takes asks", expect
    document = msgspec.msgpack.decode(decode_envelope(frame).agent_metadata_bytes)
    for name, streams, code in (
        ("unaligned", (4, 0, 1, 1), "invalid-metadata"),
        ("no-slot", (8, 0, 0, 1), "invalid-metadata"),
        ("no-entry", (8, 0, 1, 0), "invalid-metadata"),
        ("overflow", (2**64 - 16, 0, 1, 2), "invalid-metadata"),
        ("three", (8, 0, 1), "malformed-metadata"),
    ):
        data = pack({"compatibility_hash": "", "agent_metadata_bytes": pack({**document, "kvh_streams": streams})})
        yield f"refused-envelope-streams-{name}", "refused-envelope", data, f"stream memory: {name}", {"code": code}


def refused_envelopes():
    good = bytes.fromhex(RELEASES["14"]["frame"])
    extended = Codec().encode_envelope(metadata_values(good), {"model": "m"}, dialect=14, rank=(0, 0))
    flipped = bytearray(extended)
    flipped[extended.index(b"7f1c2a34")] ^= 1
    document = msgspec.msgpack.decode(msgspec.msgpack.decode(good)["agent_metadata_bytes"])

    def changed(**changes):
        return pack({"compatibility_hash": "", "agent_metadata_bytes": pack({**document, **changes})})

    cases = (
        ("empty", b"", "malformed-envelope", "no byte at all"),
        ("array", pack(["", b""]), "malformed-envelope", "an array instead of a map"),
        ("no-metadata", pack({"compatibility_hash": ""}), "malformed-envelope", "no agent_metadata_bytes"),
        (
            "hash-bytes",
            pack({"compatibility_hash": b"", "agent_metadata_bytes": b""}),
            "malformed-envelope",
            "hash as bytes",
        ),
        ("truncated", good[:-1], "malformed-envelope", "an envelope without its last byte"),
        ("bit-flip", bytes(flipped), "checksum-mismatch", "one bit of the metadata differs from its checksum"),
        (
            "metadata-empty",
            pack({"compatibility_hash": "", "agent_metadata_bytes": b""}),
            "malformed-metadata",
            "no metadata",
        ),
        ("metadata-type", changed(num_blocks="many"), "malformed-metadata", "a number as text"),
        (
            "metadata-missing",
            pack({"compatibility_hash": "", "agent_metadata_bytes": pack({"engine_id": "e"})}),
            "malformed-metadata",
            "most keys missing",
        ),
        ("lengths", changed(block_lens=[65536]), "invalid-metadata", "two regions, one block length"),
        ("zero-blocks", changed(num_blocks=0), "invalid-metadata", "no block"),
        ("zero-length", changed(block_lens=[65536, 0]), "invalid-metadata", "a block of no bytes"),
        ("negative-address", changed(kv_caches_base_addr=[-1, 0]), "invalid-metadata", "a negative address"),
        ("address-overflow", changed(kv_caches_base_addr=[2**64 - 1, 0]), "invalid-metadata", "a block past 2^64"),
        ("nameless", changed(engine_id=""), "invalid-metadata", "no engine id"),
        ("fence-unaligned", changed(kvh_fence=(4097, 0, 8)), "invalid-metadata", "a fence that is not 8-byte aligned"),
    )
    for name, data, code, meaning in cases:
        yield f"refused-envelope-{name}", "refused-envelope", data, meaning, {"code": code}


def small_messages():
    for code in SERVER_CODES:
        yield (
            f"refusal-{code}",
            "refusal",
            encode_refusal(code, "why"),
            f"refused with {code}",
            {"code": code, "message": "why", "retry_after_s": 0.0},
        )
    yield (
        "refusal-rate-limited",
        "refusal",
        encode_refusal("rate-limited", "why", retry_after_s=0.25),
        "ask later",
        {"code": "rate-limited", "message": "why", "retry_after_s": 0.25},
    )
    yield "clock-float", "clock", encode_clock(12345.625), "the clock as float64", {"clock_s": 12345.625}
    yield "clock-integer", "clock", pack(7), "the clock as an integer", {"clock_s": 7.0}
    for name, data in (
        ("empty", b""),
        ("nan", pack(float("nan"))),
        ("text", pack("1")),
        ("infinite", pack(float("inf"))),
    ):
        yield f"refused-clock-{name}", "refused-clock", data, f"a clock that is {name}", {"code": "malformed-clock"}


def hashes():
    for version, release in RELEASES.items():
        text = json.dumps(release["factors"], sort_keys=True).encode()
        meaning = f"the factors that vLLM {release['release']} hashes, as JSON"
        yield f"hash-vllm-v{version}", "hash", text, meaning, {"factors": release["factors"], "sha256": release["hash"]}
    odd = {"b": [1, 2.5, None, True], "a": {"z": "\u00e4\u6f22", "y": ""}}
    text = json.dumps(odd, sort_keys=True).encode()
    yield (
        "hash-nested",
        "hash",
        text,
        "nesting, other scripts, every JSON type",
        {"factors": odd, "sha256": compatibility_hash(odd)},
    )


def notifications():
    cases = (
        ("read", encode_read_complete("cmpl-1-0-abcdef12", 4), "a read by one of four consumer ranks is complete"),
        ("read-colons", b"a:b:c:1", "only the last colon separates"),
        ("read-unicode", "\u6f22:2".encode(), "a request id in another script"),
        ("heartbeat-one", encode_heartbeats([("r1", "")])[0], "one request is kept alive"),
        ("heartbeat-many", encode_heartbeats([("r1", ""), ("r2", ""), ("r3", "")])[0], "three requests are kept alive"),
        ("heartbeat-comma", encode_heartbeats([("a,b", "")])[0], "one request whose id holds a comma"),
        ("heartbeat-gaps", b"HB:r1,,r2,", "empty ids are skipped"),
        ("heartbeat-empty", b"HB:", "nothing is kept alive"),
        ("empty", b"", "no byte at all"),
        ("no-colon", b"request", "no count"),
        ("no-id", b":1", "no request id"),
        ("zero", b"r:0", "no reader"),
        ("negative", b"r:-1", "a negative count"),
        ("leading-zero", b"r:01", "a count with a leading zero"),
        ("space", b"r: 1", "a count with a space"),
        ("huge", b"r:65537", "too many readers"),
        ("digits", "r:\u0661".encode(), "a digit that is not ASCII"),
        ("not-utf8", b"\xff\xfe:1", "no UTF-8"),
        ("push", b"PUSH_REG:\x80", "a registration of vLLM's push mode"),
        (
            "read-nonce",
            encode_read_complete("r", 4, nonce="n1", consumer="e2"),
            "a read under a lease's nonce, with its consumer",
        ),
        ("read-nonce-odd", b'KVH:["\\u6f22:,\\"","!~",""]:1', "a request id with every separator; no consumer"),
        ("heartbeat-nonce", encode_heartbeats([("r1", "n1"), ("a,b", "n2")])[0], "two leases are renewed by nonce"),
        ("heartbeat-both", b"HB:r1,KVH:[", "no form of ours: the prefix stands at the beginning only"),
        ("nonce-no-json", b"KVH:[:1", "a read under a nonce that is no JSON"),
        ("nonce-short", b'KVH:["r","n"]:1', "a consumer is missing"),
        ("nonce-empty", b'KVH:["r","","e"]:1', "an empty nonce"),
        ("nonce-control", b'KVH:["r","n","a\\nb"]:1', "a consumer with a line break"),
        ("nonce-reserved", b'KVH:["HB:r","n","e"]:1', "a request id that is reserved"),
        ("heartbeat-nonce-empty", b"HB:,KVH:[]", "no lease is renewed"),
        ("heartbeat-nonce-no-json", b"HB:,KVH:[[", "a heartbeat that is no JSON"),
    )
    for name, data, meaning in cases:
        seen = parse_notification(data)
        expect = {
            "kind": seen.kind,
            "request_ids": list(seen.request_ids),
            "reader_count": seen.reader_count,
            "reason": seen.reason,
        }
        if any(seen.nonces):  # vectors of before the nonces stay as they are
            expect |= {"nonces": list(seen.nonces), "consumer": seen.consumer}
        yield f"notification-{name}", "notification", data, meaning, expect


def asks():
    payload = b"any bytes"
    for number in (1, 200, 70_000, 2**53 - 1):
        meaning, expect = f"ask {number}", {"number": number, "payload": payload.hex()}
        yield f"ask-{number}", "ask", encode_ask(number, payload), meaning, expect
    empty = {"number": 1, "payload": ""}
    yield "ask-empty", "ask", encode_ask(1, b""), "an ask without bytes of its own", empty
    wide = b"\x93\xc4\x03ask\xcf" + (7).to_bytes(8, "big") + b"\xc6\x00\x00\x00\x01x"
    yield "ask-wide", "ask", wide, "number and length in wider encodings", {"number": 7, "payload": "78"}
    yield "ask-cancel", "ask", encode_cancel(200), "ask 200 is taken back", {"number": 200, "payload": None}
    head = b"\x93\xc4\x03ask"
    for name, data, code, meaning in (
        ("cut", head, "malformed-query", "nothing behind the command"),
        ("trailing", encode_ask(1, b"x") + b"\x00", "malformed-query", "one byte more"),
        ("number-zero", head + b"\x00\xc4\x01x", "wrong-type", "number 0"),
        ("number-large", head + pack(2**53) + b"\xc4\x01x", "wrong-type", "number 2^53"),
        ("number-boolean", head + b"\xc3\xc4\x01x", "wrong-type", "a boolean for a number"),
        ("text", head + b"\x01\xa1x", "wrong-type", "text instead of bytes"),
        ("nil", head + b"\x01\xc0", "wrong-type", "no payload"),
        ("oversized", head + b"\x01" + pack(bytes(4200)), "oversized-query", "more than 4096 bytes"),
        ("cancel-text", b"\x92\xc4\x0acancel_ask\xa11", "wrong-type", "a number as text"),
        ("cancel-oversized", b"\x92\xc4\x0acancel_ask" + bytes(300), "oversized-query", "more than 256 bytes"),
    ):
        yield f"refused-ask-{name}", "refused-ask", data, meaning, {"code": code}
    for name, data, expect in (
        ("answer", encode_answer(200, payload), {"payload": payload.hex(), "code": "", "retry_after_s": 0.0}),
        ("busy", encode_ask_refusal(200, "ask-busy", retry_after_s=0.05), {"code": "ask-busy", "retry_after_s": 0.05}),
        ("expired", encode_ask_refusal(200, "ask-expired"), {"code": "ask-expired", "retry_after_s": 0.0}),
    ):
        yield f"answer-{name}", "answer", data, f"reply to ask 200: {name}", {"number": 200, "payload": "", **expect}
    for name, data in (
        ("empty", b""),
        ("array", pack([])),
        ("other-command", pack((b"asks", 1, b""))),
        ("text-command", pack(("ask", 1, b""))),
        ("number", pack((b"ask", 0, b""))),
        ("no-time", pack((b"ask", 1, "ask-busy"))),
        ("integer-time", pack((b"ask", 1, "ask-busy", 1))),
        ("infinite-time", pack((b"ask", 1, "ask-busy", float("inf")))),
        ("negative-time", pack((b"ask", 1, "ask-busy", -0.5))),
        ("no-code", pack((b"ask", 1, "", 0.0))),
        ("long-code", pack((b"ask", 1, "c" * 65, 0.0))),
        ("more", pack((b"ask", 1, "ask-busy", 0.0, 0))),
    ):
        yield f"refused-answer-{name}", "refused-answer", data, f"a reply: {name}", {"code": "malformed-answer"}


def all_vectors():
    before = (queries, refused_queries, envelopes, refused_envelopes, small_messages, hashes, notifications)
    sources = (*before, asks, envelopes_with_streams)
    for source in sources:
        for name, kind, data, meaning, expect in source():
            yield {"name": name, "kind": kind, "hex": data.hex(), "meaning": meaning, "expect": expect}


def lock_line(vector):
    text = json.dumps(vector, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()} {vector['name']}"


def main():
    known = json.loads(DATA_FILE.read_text())["vectors"] if DATA_FILE.exists() else []
    names = {vector["name"] for vector in known}
    vectors = known + [json.loads(json.dumps(vector)) for vector in all_vectors() if vector["name"] not in names]
    lines = ",\n".join("  " + json.dumps(vector, sort_keys=True) for vector in vectors)
    DATA_FILE.write_text('{"format": "kv-handshake-vectors", "version": 1, "vectors": [\n' + lines + "\n]}\n")
    LOCK_FILE.write_text("".join(lock_line(vector) + "\n" for vector in vectors))
    print(f"{len(vectors)} vectors, {len(vectors) - len(known)} of them new")


if __name__ == "__main__":
    main()
