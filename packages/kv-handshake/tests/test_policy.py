import msgspec
import pytest
from msgspec.structs import replace

from kv_handshake import Codec, LocalOffer
from kv_handshake.inspect import Recording, compare
from kv_handshake.testing import load_vectors, sample_metadata
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.factors import compatibility_hash
from kv_handshake.wire.messages import Envelope
from kv_handshake.wire.policy import judge
from kv_handshake.wire.replies import decode_envelope, decode_metadata, encode_refusal

VLLM = dict.fromkeys(dialect_of(14).hash_factors, "x") | {
    "vllm_version": "0.32.0",
    "nixl_connector_version": 14,
    "dtype": "torch.bfloat16",
    "model": "/models/a",
}


def peer(factors, **arguments):
    """An envelope of one of our own engines."""
    return decode_envelope(Codec(**arguments).encode_envelope(sample_metadata(), factors, dialect=14))


def silent(factors):
    """An envelope of vLLM's own connector."""
    return Envelope(compatibility_hash=compatibility_hash(factors), agent_metadata_bytes=b"")


def judged(local, envelope, **arguments):
    return judge(LocalOffer(factors=local, **arguments), envelope, 14)


@pytest.mark.parametrize("policy", ["exact", "negotiated", "off"])
@pytest.mark.parametrize("make", [peer, silent])
def test_equal_engines_are_accepted(policy, make):
    verdict = judged(VLLM, make(VLLM), policy=policy)
    assert (verdict.code, verdict.differences, verdict.warnings) == ("", (), ())


@pytest.mark.parametrize("make", [peer, silent])
def test_another_dtype_is_refused_by_name(make):
    other = make({**VLLM, "dtype": "torch.float16"})
    for policy, code in (("exact", "hash-mismatch"), ("negotiated", "factors-differ")):
        verdict = judged(VLLM, other, policy=policy)
        assert (verdict.code, [each.name for each in verdict.differences]) == (code, ["dtype"])
        assert verdict.message == 'dtype: local "torch.bfloat16", peer "torch.float16"'
        assert not verdict.is_accepted
    verdict = judged(VLLM, other, policy="off")
    assert verdict.is_accepted
    assert "dtype" in verdict.warnings[0]


@pytest.mark.parametrize("make", [peer, silent])
def test_patch_release_is_no_reason(make):
    other = make({**VLLM, "vllm_version": "0.32.1"})
    assert judged(VLLM, other).code == "hash-mismatch"
    verdict = judged(VLLM, other, policy="negotiated")
    assert verdict.is_accepted
    assert "vllm_version" in verdict.warnings[0]


PATCH, MINOR = ("vllm_version",), ("vllm_version", "nixl_connector_version")


@pytest.mark.parametrize(
    ("declared", "changes", "code"),
    [
        (PATCH, {"vllm_version": "0.32.1"}, ""),
        (PATCH, {"vllm_version": "0.32.0+cu130"}, ""),
        (PATCH, {"vllm_version": "0.32+cpu"}, ""),
        (PATCH, {"vllm_version": "0.33.0"}, "factors-differ"),  # a minor release that kept its connector's version
        (PATCH, {"vllm_version": "0.33.0", "nixl_connector_version": 15}, "hash-mismatch"),
        (MINOR, {"vllm_version": "0.33.0", "nixl_connector_version": 15}, ""),
        (MINOR, {"vllm_version": "0.31+cpu", "nixl_connector_version": 13}, ""),
        (MINOR, {"vllm_version": "0.33.0", "nixl_connector_version": 15, "dtype": "torch.float16"}, "hash-mismatch"),
        (MINOR, {"vllm_version": "0.33.0", "nixl_connector_version": 15, "attn_backend_name": "y"}, "hash-mismatch"),
        (MINOR, {"vllm_version": "0.33.0", "nixl_connector_version": 15, "sliding_window": 8}, "factors-differ"),
        ((*MINOR, "dtype"), {"dtype": "torch.float16"}, "factors-differ"),
        ((*PATCH, "cache_dtype"), {"cache_dtype": "fp8"}, ""),
        ((*PATCH, "cache_dtype"), {"cache_dtype": "fp8", "dtype": "torch.float16"}, "hash-mismatch"),
    ],
)
def test_a_declared_release_is_taken_from_a_peer_that_sends_its_factors(declared, changes, code):
    """The hash decides about all others, whose values are this engine's."""
    theirs = {**VLLM, **changes}
    dialect = theirs["nixl_connector_version"]
    frame = Codec().encode_envelope(sample_metadata(), theirs, dialect=dialect)
    offer = LocalOffer(factors=VLLM, may_differ=declared)
    verdict = judge(offer, decode_envelope(frame), dialect)
    assert verdict.code == code
    assert {each.name for each in verdict.differences} == changes.keys()
    mine = Codec().encode_envelope(sample_metadata(), VLLM, dialect=14)
    recordings = (Recording(dialect, {(0, 0): each}) for each in (mine, frame))
    hashed = {each.name for each in verdict.differences if each.name in VLLM}
    assert compare(*recordings, may_differ=declared).is_same_hash is (hashed <= {*declared})
    assert judge(offer, silent(theirs), dialect).code == "hash-mismatch", "vLLM's own connector sends the hash alone"
    refused = judge(LocalOffer(factors=theirs), peer(VLLM), 14)
    assert not refused.is_accepted, "each reader declares for itself"


@pytest.mark.parametrize("policy", ["exact", "negotiated"])
def test_a_declared_factor_may_be_absent(policy):
    full, bare = {"model": "m", "rope": 1}, {"model": "m"}
    for ours, theirs in ((full, bare), (bare, full)):
        assert judged(ours, peer(theirs), policy=policy, may_differ=["rope"]).is_accepted
        assert not judged(ours, peer(theirs), policy=policy).is_accepted


def test_elements_of_a_peer_that_sends_its_hash_alone_must_be_those_of_this_engine():
    verdict = judged(VLLM, silent({**VLLM, "cache_dtype": "fp8"}), policy="negotiated", may_differ=["cache_dtype"])
    assert (verdict.code, [each.name for each in verdict.differences]) == ("factors-differ", ["cache_dtype"])


def test_factors_that_are_not_those_of_the_hash_are_refused():
    reported = replace(peer({**VLLM, "vllm_version": "0.32.1"}), compatibility_hash=compatibility_hash(VLLM))
    assert judged(VLLM, reported, may_differ=PATCH).code == "hash-mismatch"


def test_an_unexplained_hash_is_refused():
    verdict = judged(VLLM, silent({**VLLM, "model": "/b"}), policy="negotiated")
    assert verdict.code == "hash-mismatch"
    assert "does not send its factors" in verdict.message
    assert "check is off" in judged(VLLM, silent({**VLLM, "model": "/b"}), policy="off").warnings[0]


def test_factors_outside_the_hash_count_too():
    for policy in ("exact", "negotiated"):
        verdict = judged({**VLLM, "sliding_window": 4096}, peer({**VLLM, "sliding_window": 1024}), policy=policy)
        assert (verdict.code, verdict.differences[0].name) == ("factors-differ", "sliding_window")


def test_protocol_ranges():
    assert judged(VLLM, replace(peer(VLLM), protocol=(1, 3))).is_accepted
    assert judged(VLLM, replace(peer(VLLM), protocol=(2, 3))).code == "protocol-range"


def test_capabilities():
    theirs = {"fence": "supported", "streamed": "absent", "later": "required"}
    ours = {"fence": "supported", "later": "supported", "push": "supported"}
    assert judged(VLLM, peer(VLLM, capabilities=theirs), capabilities=ours).is_accepted
    assert judged(VLLM, peer(VLLM, capabilities={"fence": "supported"}), capabilities={"fence": "required"}).is_accepted
    verdict = judged(VLLM, peer(VLLM, capabilities=theirs), capabilities={"fence": "supported"})
    assert (verdict.code, "peer requires 'later'" in verdict.message) == ("capability-missing", True)
    for levels in ({}, {"fence": "preferred"}):  # a level of a later version counts as absent
        verdict = judged(VLLM, replace(silent(VLLM), capabilities=levels), capabilities={"fence": "required"})
        assert (verdict.code, "engine requires 'fence'" in verdict.message) == ("capability-missing", True)


def test_refusal():
    verdict = judged(VLLM, decode_envelope(encode_refusal("not-ready", "soon")))
    assert (verdict.code, "not-ready: soon" in verdict.message) == ("refused", True)


def test_a_hostile_envelope_makes_no_long_text():
    factors = {"x" * 900 + str(index): "y" * 900 for index in range(120)}
    offer = LocalOffer(factors=dict.fromkeys(factors, "z"), policy="negotiated")
    frame = Codec().encode_envelope(sample_metadata(), factors, dialect=14)
    verdict = judge(offer, decode_envelope(frame), 14)
    assert verdict.code == "factors-differ"
    assert len(verdict.message) < 10_000
    assert "112 more" in verdict.message
    refusal = decode_envelope(encode_refusal("unknown-rank", "m" * 100_000))
    assert len(judge(offer, refusal, 14).message) < 1000


OURS = Codec(capabilities={"nonce": "supported", "prompt-digest": "supported"})


@pytest.mark.never_wrong("B11")
def test_the_metadata_names_the_peers_capabilities():
    frame = OURS.encode_envelope(sample_metadata(), {}, dialect=14)
    assert decode_metadata(decode_envelope(frame)).capabilities == ("nonce", "prompt-digest")


@pytest.mark.never_wrong("B11")
def test_a_peer_of_release_0_1_is_recognised_and_accepted():
    """Its envelope, a published vector, announces our protocol but not the capability."""
    (vector,) = [each for each in load_vectors() if each.name == "envelope-extended-v14"]
    envelope = decode_envelope(vector.data)
    verdict = judge(LocalOffer(policy="off", capabilities={"nonce": "supported"}), envelope, 14)
    assert verdict.is_accepted
    assert envelope.protocol == (1, 1)
    assert "nonce" not in decode_metadata(envelope).capabilities


class EnvelopeOfRelease01(msgspec.Struct, frozen=True, kw_only=True):
    """The envelope as our release 0.1 reads it."""

    compatibility_hash: str
    agent_metadata_bytes: bytes
    kvh_protocol: tuple[int, int] | None = None
    kvh_rank: tuple[int, int] | None = None
    kvh_generation: int | None = None
    kvh_factors: msgspec.Raw = msgspec.Raw(b"\x80")
    kvh_checksum: int | None = None
    kvh_capabilities: dict[str, str] = {}
    kvh_refusal: dict | None = None


@pytest.mark.never_wrong("B11")
def test_release_0_1_reads_an_envelope_with_capabilities():
    frame = OURS.encode_envelope(sample_metadata(), {"a": 1}, dialect=14, rank=(0, 0))
    read = msgspec.msgpack.decode(frame, type=EnvelopeOfRelease01)
    assert read.kvh_protocol == (1, 1)
    assert read.kvh_capabilities == {"nonce": "supported", "prompt-digest": "supported"}
    plain = Codec().encode_envelope(sample_metadata(), {"a": 1}, dialect=14, rank=(0, 0))
    assert read.agent_metadata_bytes == msgspec.msgpack.decode(plain, type=EnvelopeOfRelease01).agent_metadata_bytes
