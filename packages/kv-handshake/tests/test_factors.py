import hashlib
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_handshake import ConfigurationError, dialect_of_vllm
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.factors import compatibility_hash, differing_factors, explain_hash, suspected_factors

FULL = {
    "vllm_version": "0.32.0+cpu",
    "nixl_connector_version": 14,
    "model": "org/model",
    "dtype": "torch.bfloat16",
    "num_kv_heads": 8,
    "head_size": 128,
    "num_hidden_layers": 32,
    "attn_backend_name": "CPU_ATTN",
    "cache_dtype": "auto",
    "is_hma_enabled": True,
    "speculative_config": None,
    "transfer_mode": "pull",
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FACTOR_SETS = st.dictionaries(st.text(min_size=1, max_size=8), JSON, max_size=6)


@given(FACTOR_SETS)
def test_hash_is_sha256_of_sorted_json(factors):
    assert compatibility_hash(factors) == hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


READ_FROM_FILES = ("model_config", "model_weights", "draft_config", "draft_weights")
CONTENT = {"model_config": {"rms_norm_eps": 1e-5}, "model_weights": "ab"}


@given(FACTOR_SETS, FACTOR_SETS)
def test_differences_are_exactly_the_differing_names(local, peer):
    names = {each.name for each in differing_factors(local, peer)}
    for name in {*local, *peer}:
        is_same = json.dumps(local.get(name), sort_keys=True) == json.dumps(peer.get(name), sort_keys=True)
        assert (name in names) == (not is_same)


def test_differences_are_symmetric_and_ordered():
    peer = {**FULL, "dtype": "torch.float16", "attn_backend_name": "FLASH_ATTN", "engine_name": "x"}
    forth, back = differing_factors(FULL, peer), differing_factors(peer, FULL)
    assert [each.name for each in forth] == ["dtype", "attn_backend_name", "engine_name"]
    assert [(each.name, each.local, each.peer) for each in back] == [
        (each.name, each.peer, each.local) for each in forth
    ]
    assert str(forth[0]) == 'dtype: local "torch.bfloat16", peer "torch.float16"'


def test_of_two_maps_only_the_entries_that_differ_are_named():
    ours, theirs = {"eps": 0.3, "layers": 2, "only": "x"}, {"layers": 2, "eps": 1e-5}
    (found,) = differing_factors({"model_config": ours}, {"model_config": theirs})
    assert str(found) == 'model_config: local {"eps": 0.3, "only": "x"}, peer {"eps": 1e-05, "only": null}'
    assert found.group == "must-match"


@pytest.mark.parametrize(
    ("local", "peer", "group"),
    [
        ({"vllm_version": "0.32.0"}, {"vllm_version": "0.32.1"}, "may-differ"),
        ({"vllm_version": "0.32.0"}, {"vllm_version": "0.31.0"}, "must-match"),
        ({"vllm_version": "0.32.0"}, {}, "must-match"),
        ({"model": "/a"}, {"model": "/b"}, "must-match"),
        ({"model": "/a", "model_identity": "i"}, {"model": "/b", "model_identity": "i"}, "informative"),
        ({"model": "/a", "model_identity": "i"}, {"model": "/b"}, "must-match"),
        ({"model": "/a", **CONTENT}, {"model": "/b", **CONTENT}, "informative"),
        ({"model": "/a", **CONTENT}, {"model": "/b", **CONTENT, "model_weights": "cd"}, "must-match"),
        ({"model": "/a", **CONTENT}, {"model": "/b"}, "must-match"),
        ({"sliding_window": 4096}, {}, "must-match"),
        ({"newer": 1}, {"newer": 2}, "must-match"),
        ({"newer": 1}, {}, "must-match"),
        *(({name: "1"}, {}, "informative") for name in READ_FROM_FILES),
        *(({name: "1"}, {name: "2"}, "must-match") for name in READ_FROM_FILES),
    ],
)
def test_group_of_a_difference(local, peer, group):
    differences = {each.name: each.group for each in differing_factors(local, peer)}
    assert differences[next(iter(local))] == group


@pytest.mark.parametrize(
    ("local", "peer"), [({"groups": (1, 2)}, {"groups": [1, 2]}), ({"sliding_window": None}, {})], ids=["list", "none"]
)
def test_values_that_mean_the_same_do_not_differ(local, peer):
    assert differing_factors(local, peer) == ()


@pytest.mark.parametrize("bad", [{"a": {1, 2}}, {"a": b"x"}, {"a": object()}])
def test_factors_must_be_json(bad):
    with pytest.raises(ConfigurationError) as caught:
        compatibility_hash(bad)
    assert caught.value.code == "invalid-factors"


@pytest.mark.parametrize(
    ("release", "version"),
    [("0.20.2", 2), ("0.21.0", 3), ("0.25.1", 4), ("0.26.0", 5), ("v0.28.0", 7), ("0.32.0+cpu", 14), ("0.40.0", 15)],
)
def test_dialect_of_a_release(release, version):
    assert dialect_of_vllm(release).version == version


@pytest.mark.parametrize("wanted", ["", "0", "new", "0.19.0", 1, 16, -1])
def test_no_dialect_of_other_releases_and_versions(wanted):
    with pytest.raises(ConfigurationError) as caught:
        (dialect_of_vllm if isinstance(wanted, str) else dialect_of)(wanted)
    assert caught.value.code == "unknown-dialect"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.float32"},
        {"cache_dtype": "fp8"},
        {"attn_backend_name": "FLASH_ATTN"},
        {"is_hma_enabled": False},
        {"num_kv_heads": 4},
        {"head_size": 64},
        {"num_hidden_layers": 28},
        {"transfer_mode": "push"},
        {"vllm_version": "0.32.1"},
        {"vllm_version": "0.31.0+cpu", "nixl_connector_version": 13},
    ],
)
def test_a_bare_hash_is_explained(change):
    found = explain_hash(FULL, compatibility_hash({**FULL, **change}), dialect_of(14))
    assert {each.name: each.peer for each in found} == change


def test_a_model_is_only_found_if_supposed():
    peer_hash = compatibility_hash({**FULL, "model": "/other"})
    assert explain_hash(FULL, peer_hash, dialect_of(14)) == ()
    assert suspected_factors(FULL, dialect_of(14)) == ("model", "speculative_config")
    (found,) = explain_hash(FULL, peer_hash, dialect_of(14), supposed={"model": ["/x", "/other"]})
    assert (found.name, found.peer) == ("model", "/other")


def test_supposed_values_are_combined_with_one_that_is_tried():
    change = {"model": "/b", "num_hidden_layers": 200, "dtype": "torch.float32"}
    supposed: dict[str, Sequence[object]] = {"model": ["/a", "/b"], "num_hidden_layers": [200], "unheard-of": [1]}
    found = explain_hash(FULL, compatibility_hash({**FULL, **change}), dialect_of(14), supposed=supposed)
    assert {each.name: each.peer for each in found} == change


def test_explaining_engines_that_are_not_vllm():
    local = {"dtype": "torch.float16", "vllm_version": 3}
    (found,) = explain_hash(local, compatibility_hash({**local, "dtype": "torch.float32"}), dialect_of(14))
    assert found.name == "dtype"
    nameless = {"vllm_version": "0.32.0"}
    (found,) = explain_hash(nameless, compatibility_hash({"vllm_version": "0.32.1"}), dialect_of(14))
    assert found.peer == "0.32.1"
