"""`kv_cache_groups` between engines with and without pipeline stages: random groups, dealt to random stages as vLLM does it."""

import copy

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kv_handshake import Codec, LocalOffer
from kv_handshake.testing import sample_metadata
from kv_handshake.wire.factors import differing_factors
from kv_handshake.wire.policy import judge
from kv_handshake.wire.replies import decode_envelope

KINDS = ("attention", "sliding-window", "latent", "state")
BASE = {"model": "org/model", "dtype": "torch.bfloat16"}
ONE = [["attention", 0, ["a", "c"]], ["sliding-window", 64, ["b", "d"]]]


def factors(groups, stages=1):
    return {**BASE, "kv_cache_groups": groups, **({"pp_size": stages} if stages > 1 else {})}


def stage_of(groups, layers):
    """Source: vLLM's `_project_kv_cache_groups_to_worker`."""
    return [[*group[:-1], [layer for layer in group[-1] if layer in layers]] for group in groups]


def meaning(local, peer):
    """Return the group of the difference in both directions, which must be one; empty if there is none."""
    found = {
        tuple(each.group for each in differing_factors(*pair) if each.name == "kv_cache_groups")
        for pair in ((local, peer), (peer, local))
    }
    (one,) = found
    return one[0] if one else ""


def verdicts(local, peer):
    envelope = decode_envelope(Codec().encode_envelope(sample_metadata(), peer, dialect=14))
    return judge(LocalOffer(factors=local, policy="negotiated"), envelope, 14)


@st.composite
def models(draw):
    """Groups of a whole model, and the layers of each of its stages."""
    count = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    groups = [
        [
            draw(st.sampled_from(KINDS)),
            draw(st.sampled_from([0, 64, 4096])),
            *draw(st.lists(st.integers(0, 3), max_size=1)),
            sorted(f"layers.{number}" for number, owner in enumerate(owners) if owner == group),
        ]
        for group in range(count)
    ]
    size = draw(st.integers(2, 4))
    stages = draw(st.lists(st.integers(0, size - 1), min_size=len(owners), max_size=len(owners)))
    return groups, [{f"layers.{n}" for n, owner in enumerate(stages) if owner == stage} for stage in range(size)]


def changes(groups, data):
    """Return the groups after one change that would give a layer's bytes another meaning, or its blocks another number."""
    changed = copy.deepcopy(groups)
    number = data.draw(st.integers(0, len(groups) - 1))
    kind = data.draw(st.sampled_from(["kind", "window", "moved", "swapped", "dropped", "added", "renamed"]))
    group, other = changed[number], changed[data.draw(st.integers(0, len(groups) - 1))]
    if kind == "kind":
        group[0] = data.draw(st.sampled_from([each for each in KINDS if each != group[0]]))
    elif kind == "window":
        group[1] += 16
    elif kind == "moved":
        assume(group is not other and group[-1])
        other[-1].append(group[-1].pop())
    elif kind == "swapped":
        assume(group is not other and (group[-1] or other[-1]))
        group[-1], other[-1] = other[-1], group[-1]
    elif kind == "dropped":
        changed.pop(number)
    elif kind == "added":
        changed.append(["attention", 0, []])
    else:
        assume(group[-1])
        group[-1][0] = "a layer of another model"
    return changed


@given(models())
def test_every_stage_may_hand_over_to_an_engine_of_one_stage(model):
    groups, stages = model
    for layers in stages:
        peer = factors(stage_of(groups, layers), len(stages))
        assert meaning(factors(groups), peer) == ("" if peer["kv_cache_groups"] == groups else "may-differ")
        assert verdicts(factors(groups), peer).is_accepted


@given(models(), st.data())
def test_a_stage_of_another_model_is_refused(model, data):
    groups, stages = model
    layers = data.draw(st.sampled_from(stages))
    part = stage_of(groups, layers)
    changed = changes(part, data)
    assert meaning(factors(groups), factors(changed, len(stages))) == "must-match"
    assert verdicts(factors(groups), factors(changed, len(stages))).code == "factors-differ"


@given(models(), models())
def test_between_engines_of_one_stage_the_value_must_match(one, other):
    groups, stages = one
    for value in (other[0], *(stage_of(groups, layers) for layers in stages)):
        expected = "" if value == groups else "must-match"
        assert meaning(factors(groups), factors(value)) == expected
        assert meaning({**factors(groups), "pp_size": 1}, factors(value)) == expected


@given(models(), st.data())
def test_two_engines_with_stages_are_compared_over_the_layers_that_both_hold(model, data):
    groups, stages = model
    names = sorted(set().union(*stages))
    held = [data.draw(st.sets(st.sampled_from(names))) for _ in range(2)]
    one, other = (factors(stage_of(groups, layers), 2) for layers in held)
    assert meaning(one, other) in {"", "may-differ"}
    moved = changes(stage_of(groups, held[1]), data)
    whole = {layer: number for number, group in enumerate(groups) for layer in group[-1]}
    is_alike = [group[:-1] for group in moved] == [group[:-1] for group in groups] and all(
        whole[layer] == number
        for number, group in enumerate(moved)
        for layer in group[-1]
        if layer in held[0] and layer in whole
    )
    assert (meaning(one, factors(moved, 2)) != "must-match") == is_alike


@pytest.mark.parametrize(
    "value",
    [
        None,
        "groups",
        [["full", 2]],
        ["attention"],
        [[]],
        [["attention", 0, ["a"]], ["sliding-window", 64, "b"]],
        [["attention", 0, [1]], ["sliding-window", 64, []]],
        [["attention", 0, ["a", "a"]], ["sliding-window", 64, []]],
        [["attention", 0, ["a"]], ["sliding-window", 64, ["a"]]],
        [["attention", False, ["a"]], ["sliding-window", 64, []]],
        {"attention": ["a"]},
    ],
)
def test_a_value_that_names_no_layers_must_match(value):
    assert meaning(factors(ONE), factors(value, 2)) == "must-match"


@pytest.mark.parametrize("size", [True, 2.0, "2", 1, 0, -2, None, [2]])
def test_only_a_number_above_one_tells_of_stages(size):
    part = stage_of(ONE, {"a", "b"})
    assert meaning(factors(ONE), {**factors(part), "pp_size": size}) == "must-match"
    assert meaning(factors(ONE), factors(part, 2)) == "may-differ"


@pytest.mark.parametrize("is_peer_staged", [True, False])
def test_a_stage_with_a_layer_that_the_whole_model_lacks_is_refused(is_peer_staged):
    sides = [factors(ONE), factors([["attention", 0, ["another"]], ["sliding-window", 64, []]], 2)]
    assert meaning(*(sides if is_peer_staged else sides[::-1])) == "must-match"
