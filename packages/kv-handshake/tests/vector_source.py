"""Conformance vectors as our writers encode them. Run it to append new ones; published ones must stay as they are.

Vectors that no writer of ours makes, such as refused messages, are published in the data file alone.

    python packages/kv-handshake/tests/vector_source.py

Frames "as vLLM writes them" were written by the metadata classes of that release; they are in `data/vllm_frames.json`.
"""

import hashlib
import json
from pathlib import Path

import msgspec

from kv_handshake import Codec
from kv_handshake.wire.asks import encode_answer, encode_ask, encode_ask_refusal, encode_cancel
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
        for rank in ((0, 0), (0, 3), (0, 200)) + (((2, 1),) if dialect.has_clock_frame else ()):
            expect = {"command": "metadata", "pp": rank[0], "tp": rank[1], "clock": dialect.has_clock_frame}
            name = f"query-v{version}-pp{rank[0]}-tp{rank[1]}"
            meaning = f"version {version} asks for pp rank {rank[0]}, tp rank {rank[1]}"
            yield name, "query", encode_query(rank, dialect), meaning, expect


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
        ("heartbeat-one", encode_heartbeats([("r1", "")])[0], "one request is kept alive"),
        ("heartbeat-many", encode_heartbeats([("r1", ""), ("r2", ""), ("r3", "")])[0], "three requests are kept alive"),
        ("heartbeat-comma", encode_heartbeats([("a,b", "")])[0], "one request whose id holds a comma"),
        (
            "read-nonce",
            encode_read_complete("r", 4, nonce="n1", consumer="e2"),
            "a read under a lease's nonce, with its consumer",
        ),
        ("heartbeat-nonce", encode_heartbeats([("r1", "n1"), ("a,b", "n2")])[0], "two leases are renewed by nonce"),
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
    yield "ask-cancel", "ask", encode_cancel(200), "ask 200 is taken back", {"number": 200, "payload": None}
    for name, data, expect in (
        ("answer", encode_answer(200, payload), {"payload": payload.hex(), "code": "", "retry_after_s": 0.0}),
        ("busy", encode_ask_refusal(200, "ask-busy", retry_after_s=0.05), {"code": "ask-busy", "retry_after_s": 0.05}),
        ("expired", encode_ask_refusal(200, "ask-expired"), {"code": "ask-expired", "retry_after_s": 0.0}),
    ):
        yield f"answer-{name}", "answer", data, f"reply to ask 200: {name}", {"number": 200, "payload": "", **expect}


def all_vectors():
    for source in (queries, envelopes, small_messages, hashes, notifications, asks, envelopes_with_streams):
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
