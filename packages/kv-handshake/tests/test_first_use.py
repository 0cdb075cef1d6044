"""First use by an engine that is not vLLM: safe defaults, typed metadata, and a coded error for every wrong type."""

# mypy: disable-error-code="arg-type, dict-item, misc, call-overload, list-item"
# The wrong types are what is tested.

import pytest

from kv_handshake import (
    AgentMetadata,
    Client,
    Codec,
    HandshakeError,
    Listener,
    LocalOffer,
    QueryLimits,
    Timing,
    dialect_of_vllm,
    inspect,
)
from kv_handshake.security import write_keypair
from kv_handshake.testing import sample_metadata
from kv_handshake.wire.factors import differing_factors
from kv_handshake.wire.policy import judge

OWN = {"dtype": "float16", "kv_heads": 8}


@pytest.mark.parametrize("policy", ["exact", "negotiated"])
def test_a_factor_of_ones_own_that_one_side_omits_is_a_difference_unless_it_may_differ(policy):
    less = {"dtype": "float16"}
    for ours, theirs in ((OWN, less), (less, OWN)):
        envelope = Codec.decode_envelope(Codec().encode_envelope(sample_metadata(), theirs))
        verdict = judge(LocalOffer(factors=ours, policy=policy), envelope, 15)
        assert verdict.code in {"factors-differ", "hash-mismatch"}
        assert "kv_heads" in verdict.message
    offer = LocalOffer(factors=OWN, policy="negotiated", may_differ=["kv_heads"])
    verdict = judge(offer, Codec.decode_envelope(Codec().encode_envelope(sample_metadata(), less)), 15)
    assert (verdict.code, [each.group for each in verdict.differences]) == ("", ["may-differ"])
    assert differing_factors({"dtype": "x"}, {"dtype": "y"}, may_differ=["dtype"])[0].group == "must-match"


def test_an_engine_that_is_not_vllm_gives_neither_a_dialect_nor_fields_of_vllm():
    least = {
        "engine_id": "e",
        "agent_metadata": b"blob",
        "kv_caches_base_addr": (4096,),
        "device_id": 0,
        "num_blocks": 4,
        "block_lens": (64,),
        "kv_cache_layout": "HND",
        "block_size": 16,
    }
    envelope = Codec().encode_envelope(AgentMetadata(**least), OWN, rank=(0, 0))
    assert envelope == Codec().encode_envelope(least, OWN, rank=(0, 0))
    with Listener("127.0.0.1", 0, payloads={(0, 0): envelope}) as listener, Client(LocalOffer(factors=OWN)) as client:
        outcome = client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)])
    assert outcome.is_ok, outcome.message
    peer = outcome.peers[0, 0]
    assert (peer.ssm_sizes, peer.attn_backend_name, peer.physical_blocks_per_logical_kv_block) == ((0, 0), "", 1)
    assert not listener.is_alive
    with pytest.raises(HandshakeError, match="client is closed"):
        client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)])


AT = {"host": "127.0.0.1", "port": 5600}
REQUESTED = {"ranks": [(0, 0)], "engine_id": "e", "on_done": print}
ASKED = {"payload": b"", "on_reply": print, "deadline_s": 1.0}
WRONG = {
    "metadata": lambda: Codec().encode_envelope(7, {}),
    "metadata's keys": lambda: Codec().encode_envelope({7: 1, "x": 2}, {}),
    "factors": lambda: Codec().encode_envelope(sample_metadata(), 7),
    "factors' keys": lambda: Codec().encode_envelope(sample_metadata(), {7: 1}),
    "hashed factors": lambda: Codec.compatibility_hash([1]),
    "written dialect": lambda: Codec().encode_envelope(sample_metadata(), {}, dialect="15"),
    "unhashable dialect": lambda: Codec().encode_envelope(sample_metadata(), {}, dialect=[]),
    "written rank": lambda: Codec().encode_envelope(sample_metadata(), {}, rank=0),
    "rank of one": lambda: Codec().encode_envelope(sample_metadata(), {}, rank=(0,)),
    "rank of texts": lambda: Codec().encode_envelope(sample_metadata(), {}, rank=("0", "0")),
    "rank of bools": lambda: Codec().encode_envelope(sample_metadata(), {}, rank=(True, 0)),
    "generation": lambda: Codec().encode_envelope({**sample_metadata(), "generation": True}, {}),
    "capabilities": lambda: Codec(capabilities=7),
    "level": lambda: Codec(capabilities={"fence": []}),
    "envelope's frame": lambda: Codec.decode_envelope("text"),
    "envelope": lambda: Codec.decode_metadata(b"bytes"),
    "served payloads": lambda: Codec.server_core(7),
    "served rank": lambda: Codec.server_core({0: b""}),
    "served payload": lambda: Codec.server_core({(0, 0): "text"}),
    "query": lambda: Codec.server_core({}).respond("query", clock_s=0.0),
    "session's offer": lambda: Codec.client_session({}, [(0, 0)]),
    "session's rank": lambda: Codec.client_session(LocalOffer(), [0]),
    "session's unhashable rank": lambda: Codec.client_session(LocalOffer(), [[0, 0]]),
    "session's engine": lambda: Codec.client_session(LocalOffer(), [(0, 0)], engine_id=7),
    "session's generation": lambda: Codec.client_session(LocalOffer(), [(0, 0)], generation="1"),
    "request id": lambda: Codec.read_complete(7, 1),
    "reader count": lambda: Codec.read_complete("r", "1"),
    "nonce": lambda: Codec.read_complete("r", 1, nonce=7),
    "heartbeats": lambda: Codec.heartbeats(7),
    "heartbeat": lambda: Codec.heartbeats(["r"]),
    "notification": lambda: Codec.parse_notification("text"),
    "offered factors": lambda: LocalOffer(factors=7),
    "policy": lambda: LocalOffer(policy=[]),
    "may_differ": lambda: LocalOffer(may_differ="kv_heads"),
    "timing": lambda: Timing(deadline_s="1"),
    "pipeline": lambda: Timing(pipeline=None),
    "limits": lambda: QueryLimits(burst="1"),
    "release": lambda: dialect_of_vllm(0.32),
    "listener's host": lambda: Listener(7, 0),
    "listener's port": lambda: Listener("127.0.0.1", "0"),
    "listener's payloads": lambda: Listener("127.0.0.1", 0, payloads={0: b""}),
    "listener's limits": lambda: Listener("127.0.0.1", 0, limits=7),
    "listener's keys": lambda: Listener("127.0.0.1", 0, security="keys"),
    "listener's clock": lambda: Listener("127.0.0.1", 0, clock=0.0),
    "new payloads": lambda: Listener("127.0.0.1", 0).replace([b""]),
    "takers": lambda: Listener("127.0.0.1", 0).take_asks(None, None),
    "wait": lambda: Listener("127.0.0.1", 0).take_asks(print, print, wait_s="1"),
    "answer": lambda: Listener("127.0.0.1", 0).answer(1, "text"),
    "client's offer": lambda: Client({}),
    "client's timing": lambda: Client(LocalOffer(), timing=1.0),
    "client's keys": lambda: Client(LocalOffer(), security="keys"),
    "probed rank": lambda: inspect.probe(**AT, dialect=15, ranks=0, timeout_s=1.0),
    "probe's wait": lambda: inspect.probe(**AT, dialect=15, ranks=[(0, 0)], timeout_s="1"),
    "compared": lambda: inspect.compare({}, {}),
    "key's name": lambda: write_keypair("/nowhere", 7),
    "unknown policy": lambda: LocalOffer(policy="strict"),
    "unknown level": lambda: LocalOffer(capabilities={"a": "perhaps"}),
    "bytes in factors": lambda: LocalOffer(factors={"a": b""}),
    "too many factors": lambda: LocalOffer(factors=dict.fromkeys(map(str, range(257)), 0)),
    **{
        f"{name} of {value:g}": lambda name=name, value=value: Timing(**{name: value})
        for name, value in (
            ("deadline_s", 0),
            ("attempt_s", 1e9),
            ("pipeline", 0),
            ("pipeline", 65),
            ("connections", 0),
        )
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_a_wrong_type_or_value_is_a_coded_error(case):
    with pytest.raises(HandshakeError) as caught:
        WRONG[case]()
    assert caught.value.fault == "local"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(("request", {key: odd}) for key, odd in (("host", 7), ("port", "1"), ("ranks", 0), ("ranks", [0]))),
        *(("request", {key: odd}) for key, odd in (("engine_id", 7), ("dialect", "15"), ("on_done", None))),
        *(("ask", {key: odd}) for key, odd in (("payload", "text"), ("on_reply", None), ("deadline_s", "1"))),
    ],
    ids=str,
)
def test_a_call_of_a_client_with_a_wrong_type_is_a_coded_error(name, changes):
    good = {"request": REQUESTED, "ask": ASKED}[name]
    with Client(LocalOffer()) as client, pytest.raises(HandshakeError) as caught:
        getattr(client, name)(**{**AT, **good, **changes})
    assert caught.value.fault == "local"
