"""Every conformance vector, read and written by an implementation that was made from docs/wire alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gopher import Gopher
from wire_values import METADATA

from kv_handshake import Codec
from kv_handshake.testing import load_vectors

VECTORS = load_vectors()
OURS = {"fence": "kvh_fence", "geometry": "kvh_geometry", "streams": "kvh_streams"}
ENVELOPES = {"generation": "kvh_generation", "factors": "kvh_factors"}


def of_kind(*kinds: str) -> list[Any]:
    return [pytest.param(each, id=each.name) for each in VECTORS if each.kind in kinds]


def test_every_kind_of_vector_is_read_here() -> None:
    assert {each.kind for each in VECTORS} - {"advertisement", "stream"} == {
        *("query", "refused-query", "envelope", "refused-envelope", "refusal", "clock", "refused-clock"),
        *("hash", "notification", "ask", "refused-ask", "answer", "refused-answer"),
    }


@pytest.mark.parametrize("vector", of_kind("query"))
def test_query(gopher: Gopher, vector: Any) -> None:
    if vector.name == "query-advertisement":  # of release 0.2
        assert gopher.code("query", hex=vector.data.hex()) == "unknown-command"
        return
    query = gopher.ok("query", hex=vector.data.hex())
    assert query == vector.expect
    written = gopher.ok("make-query", dialect=14 if query["clock"] else 4, pp=query["pp"], tp=query["tp"])
    assert (written == vector.data.hex()) is (vector.name != "query-wide-integers")


@pytest.mark.parametrize("vector", of_kind("refused-query", "refused-envelope", "refused-clock"))
def test_refused(gopher: Gopher, vector: Any) -> None:
    code = "unknown-command" if vector.name == "refused-query-advertisement-rank" else vector.expect["code"]
    assert gopher.code(vector.kind.removeprefix("refused-"), hex=vector.data.hex()) == code


@pytest.mark.parametrize("vector", of_kind("ask", "answer"))
def test_asks_and_answers(gopher: Gopher, vector: Any) -> None:
    read = gopher.ok("ask-query" if vector.kind == "ask" else "answer", hex=vector.data.hex())
    assert (read.pop("again") == vector.data.hex()) is (vector.name != "ask-wide")
    assert read == vector.expect


@pytest.mark.parametrize("vector", of_kind("refused-ask", "refused-answer"))
def test_refused_asks_and_answers(gopher: Gopher, vector: Any) -> None:
    do = "ask-query" if vector.kind == "refused-ask" else "answer"
    assert gopher.code(do, hex=vector.data.hex()) == vector.expect["code"]


@pytest.mark.parametrize("vector", of_kind("envelope"))
def test_envelope(gopher: Gopher, vector: Any) -> None:
    read = gopher.ok("envelope", hex=vector.data.hex(), dialect=vector.expect["dialect"])
    envelope, metadata = read["envelope"], read["metadata"]
    assert envelope["compatibility_hash"] == vector.expect["compatibility_hash"]
    assert envelope["kvh_capabilities"] == vector.expect.get("capabilities", {})
    assert envelope["kvh_rank"] == vector.expect.get("rank")
    for name, value in vector.expect["metadata"].items():
        found = envelope[ENVELOPES[name]] if name in ENVELOPES else metadata[OURS.get(name, name)]
        assert found == value, name
    assert read["again"] == vector.data.hex()


@pytest.mark.parametrize("vector", of_kind("refusal"))
def test_refusal(gopher: Gopher, vector: Any) -> None:
    assert gopher.ok("envelope", hex=vector.data.hex())["refusal"] == vector.expect
    code, message, wait = (vector.expect[key] for key in ("code", "message", "retry_after_s"))
    written = bytes.fromhex(gopher.ok("make-refusal", code=code, message=message, wait=wait))
    refusal = Codec.decode_envelope(written).refusal
    assert refusal
    assert (refusal.code, refusal.message, refusal.retry_after_s) == (code, message, wait)


@pytest.mark.parametrize("vector", of_kind("clock"))
def test_clock(gopher: Gopher, vector: Any) -> None:
    read = gopher.ok("clock", hex=vector.data.hex())
    assert read["clock_s"] == vector.expect["clock_s"]
    assert vector.name == "clock-integer" or read["again"] == vector.data.hex()


@pytest.mark.parametrize("vector", of_kind("hash"))
def test_hash(gopher: Gopher, vector: Any) -> None:
    read = gopher.ok("hash", factors=vector.expect["factors"])
    assert bytes.fromhex(read["json"]) == vector.data
    assert read["hash"] == vector.expect["sha256"]


@pytest.mark.parametrize("vector", of_kind("notification"))
def test_notification(gopher: Gopher, vector: Any) -> None:
    read = gopher.ok("notification", hex=vector.data.hex())
    found = {
        key: value or [] if key in {"request_ids", "nonces"} else value for key, value in read["notification"].items()
    }
    assert found == {"nonces": [""] * len(found["request_ids"]), "consumer": ""} | vector.expect
    if found["kind"] != "unknown":
        again = Codec().parse_notification(bytes.fromhex(read["again"]))
        assert again == Codec().parse_notification(vector.data)


def test_hashes_of_500_engines(gopher: Gopher) -> None:
    """Factors of every kind, texts with controls and other planes, floats at the borders of both notations."""
    draw = random.Random(7)
    values = [
        None,
        True,
        0,
        -1,
        2**53,
        1.5,
        1e16,
        1e15,
        1e-5,
        0.0001,
        30.0,
        1e300,
        "",
        "é",
        '\U0001f600\x00\x7f/"\\\n',
        [1, []],
        {"b": {}, "a": 1},
    ]
    base = next(each for each in VECTORS if each.name == "envelope-extended-v14").expect["metadata"]["factors"]
    more = [
        "model_identity",
        "model_revision",
        "quantization",
        "sliding_window",
        "kv_cache_groups",
        "draft_model",
        "unknown",
    ]
    for _ in range(500):
        factors = {name: draw.choice(values) if draw.random() < 0.2 else value for name, value in base.items()}
        factors |= {name: draw.choice(values) for name in draw.sample(more, 2)}
        factors["vllm_version"] = draw.choice(["0.32.1", "0.32", "1", "0.33.0rc1+cpu", None, "a.b.c.d"])
        for name in draw.sample(sorted(factors), draw.choice([0, 1])):
            del factors[name]
        dialect = draw.randrange(2, 16)
        envelope = Codec.decode_envelope(Codec().encode_envelope(METADATA, factors, dialect=dialect))
        read = gopher.ok("hash", factors=factors, dialect=dialect)
        assert read["hash"] == envelope.compatibility_hash, factors
