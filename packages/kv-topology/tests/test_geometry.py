"""Geometries that contradict themselves or each other are refused with a code and the numbers; documents survive."""

import dataclasses
import json
from dataclasses import replace
from typing import Any, cast

import pytest
from helpers import LONG, STATE, lists, refused
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from odd_input import places, put

from kv_topology import (
    Axis,
    FieldLayout,
    GeometryMismatch,
    Group,
    InvalidGeometry,
    Layout,
    Member,
    Planner,
    RankGeometry,
    Region,
    StageLayer,
    TokenDeal,
    TopologyError,
    UnsupportedTopology,
    from_document,
    plan_transfer,
    to_document,
)
from kv_topology.tools import EngineSpec, ModelSpec, build_engine
from kv_topology.tools.engine import KV_LAYOUTS

MODEL = ModelSpec(("attention", "mamba2"), 4, 4, state=STATE)


def axis(name="channel", size=4, start=0, stop=4, stride=2, split="whole"):
    return Axis(name, size, start, stop, stride, split)


def field(*axes, name="key", element=2, offset=0, packing=""):
    return FieldLayout(name, element, offset, axes, packing)


def rank(*fields, page=64, stride=64, pages=4, group=None, base=4096, tp: tuple[int, ...] = (1, 0), extra=(), **region):
    layout = Layout(tuple(fields))
    regions = (Region(base, page, stride, pages, (Member("a", layout, 0),), **region), *extra)
    return RankGeometry(tp[0], tp[1], (group or Group("attention", 4),), regions)


def beside(base, layer, group=0):
    """A second region, of pages of 8 bytes, beside that of layer "a"."""
    return rank(field(axis()), extra=(Region(base, 8, 8, 4, (Member(layer, Layout((field(axis()),)), group),)),))


STAGE = (StageLayer("a", 0, ()),)
TOKENS = axis("token", 4, 0, 4, 8)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: rank(field(axis(size=0, stop=0))), "size-out-of-range"),
        (lambda: rank(field(axis(start=2, stop=2))), "interval-out-of-range"),
        (lambda: rank(field(axis(stop=5))), "interval-out-of-range"),
        (lambda: rank(field(axis(start=-1))), "interval-out-of-range"),
        (lambda: rank(field(axis(split="cp"))), "bad-split"),
        (lambda: rank(field(axis(start=1))), "whole-axis-partial"),
        (lambda: rank(field(axis(stride=0))), "size-out-of-range"),
        (lambda: rank(field(axis(stride=1))), "strides-overlap"),
        (lambda: rank(field(TOKENS, axis(stride=8))), "strides-overlap"),
        (lambda: rank(field(axis(), axis())), "axis-repeated"),
        (lambda: rank(field(axis("x", split="tp"), axis("y", 2, 0, 2, 8, "tp"))), "two-split-axes"),
        (lambda: rank(field(axis("token", 4, 0, 4, 8, "tp"), axis())), "token-axis-split"),
        (lambda: rank(field(TOKENS, axis(), packing="vec")), "packed-token-axis"),
        (lambda: rank(field(axis(), element=0)), "size-out-of-range"),
        (lambda: rank(field(axis(), offset=-1)), "size-out-of-range"),
        (lambda: rank(field(*(axis(f"a{n}", 1, 0, 1, 2) for n in range(9)))), "size-out-of-range"),
        (rank, "layout-empty"),
        (lambda: rank(field(axis()), field(axis(), name="value", offset=7)), "fields-overlap"),
        (lambda: rank(field(TOKENS, axis()), page=31), "field-outside-page"),
        (lambda: rank(field(axis()), page=64, stride=63), "size-out-of-range"),
        (lambda: rank(field(axis()), pages=0), "size-out-of-range"),
        (lambda: rank(field(axis()), base=(1 << 64) - 255), "size-out-of-range"),
        (lambda: rank(field(axis()), base=-1), "size-out-of-range"),
        (lambda: rank(field(axis()), memory_kind="TAPE"), "bad-memory-kind"),
        (lambda: rank(field(axis()), device=-1), "size-out-of-range"),
        (lambda: rank(field(axis()), group=Group(cast("Any", "tape"), 4)), "bad-group-kind"),
        (lambda: rank(field(axis()), group=Group("state", 4)), "size-out-of-range"),
        (lambda: rank(field(axis()), group=Group("attention", 0)), "size-out-of-range"),
        (lambda: rank(field(axis()), group=Group("attention", 4, 3)), "block-not-whole-pages"),
        (lambda: rank(field(axis()), group=Group("attention", 4, 0)), "size-out-of-range"),
        (lambda: rank(field(axis()), group=Group("attention", 4, 1, -1)), "size-out-of-range"),
        (lambda: rank(field(axis()), group=Group("attention", 4, deal=TokenDeal(2, 2, 4))), "size-out-of-range"),
        (lambda: rank(field(axis()), group=Group("attention", 4, deal=TokenDeal(2, 1, 3))), "deal-not-block-aligned"),
        (lambda: rank(field(axis()), group=Group("state", 0, deal=TokenDeal(2, 1, 3))), "deal-not-block-aligned"),
        (lambda: rank(field(TOKENS, axis()), group=Group("attention", 8)), "page-tokens-differ"),
        (lambda: rank(field(TOKENS, axis()), group=Group("state", 0)), "state-has-tokens"),
        (lambda: rank(field(axis(split="tp")), tp=(2, 0)), "shard-irregular"),
        (lambda: rank(field(axis(split="tp", stop=2)), tp=(2, 1)), "shard-irregular"),
        (lambda: rank(field(axis()), tp=(1, 1)), "size-out-of-range"),
        (lambda: rank(field(axis()), tp=(0, 0)), "size-out-of-range"),
        (lambda: replace(rank(field(axis())), pp_rank=1), "size-out-of-range"),
        (lambda: replace(rank(field(axis())), groups=()), "size-out-of-range"),
        (lambda: replace(rank(field(axis())), regions=()), "size-out-of-range"),
        (lambda: replace(rank(field(axis())), stage_layers=(STAGE, STAGE)), "stage-layers-count"),
        (lambda: beside(0, "b", group=1), "size-out-of-range"),
        (lambda: beside(4160, "b"), "regions-overlap"),
        (lambda: beside(8192, "a"), "field-twice"),
    ],
)
def test_contradictions_are_refused(make, code):
    with refused(code, "local", InvalidGeometry) as caught:
        make()
    assert caught.value.is_retry_safe is False
    assert caught.value.message.endswith(".")


def parts(*intervals):
    regions = [
        Region(base * 4096, 64, 64, 4, (Member("a", Layout((field(axis(start=a, stop=b, split="tp")),)), 0),))
        for base, (a, b) in enumerate(intervals, 1)
    ]
    return RankGeometry(1, 0, (Group("attention", 4),), tuple(regions))


def test_parts_of_a_field_make_up_its_share():
    assert parts((2, 4), (0, 2)).layers == ("a",)
    for one, two in ((((2, 4), (0, 2)), ((0, 2), (2, 4))), (((0, 4),), ((0, 1), (1, 4)))):
        (found,) = plan_transfer(parts(*one), {(0, 0): parts(*two)}).slices((0, 0))
        assert sorted(found.columns.length.tolist()) == sorted(2 * (stop - start) for start, stop in two)
    for intervals, code in (
        (((0, 3), (2, 4)), "parts-overlap"),
        (((0, 1), (2, 4)), "parts-leave-hole"),
        (((0, 2), (2, 3)), "shard-irregular"),
    ):
        with refused(code):
            parts(*intervals)


def test_rows_of_one_page_may_be_regions_of_their_own():
    layout = Layout((field(axis()),))
    regions = [Region(4096 + 8 * n, 8, 32, 5, (Member(f"l{n}", layout, 0),)) for n in range(4)]
    assert len(RankGeometry(1, 0, (Group("attention", 4),), tuple(regions)).layers) == 4
    for bad in (
        Region(4096 + 28, 8, 32, 5, (Member("x", layout, 0),)),
        Region(4100, 8, 32, 5, (Member("x", layout, 0),)),
    ):
        with refused("regions-overlap"):
            RankGeometry(1, 0, (Group("attention", 4),), (*regions, bad))
    other = (*regions, Region(4096, 8, 32, 5, (Member("x", layout, 1),)))
    assert RankGeometry(1, 0, (Group("attention", 4), Group("attention", 4)), other).groups
    twin = (*regions, replace(regions[0], device=1, members=(Member("y", layout, 0),)))
    assert RankGeometry(1, 0, (Group("attention", 4),), twin).groups


def engine(tp=1, model=MODEL, **spec):
    return build_engine(model, EngineSpec(tp, **{"block_tokens": 32, **spec}))


def changed(geometry, **field_changes):
    def change(part):
        axes = tuple(replace(a, **field_changes[a.name]) if a.name in field_changes else a for a in part.axes)
        return replace(part, axes=axes, **field_changes.get("field", {}))

    regions = tuple(
        replace(
            region,
            page_bytes=region.page_bytes * 4,
            page_stride_bytes=region.page_stride_bytes * 4,
            base_address=region.base_address * 8,
            members=tuple(replace(m, layout=Layout(tuple(change(f) for f in m.layout.fields))) for m in region.members),
        )
        for region in geometry.regions
    )
    return replace(geometry, regions=regions)


DENSE = ModelSpec(("attention",), 4, 4)
DENSE2 = ModelSpec(("attention",) * 2, 4, 4)


@pytest.mark.parametrize(
    ("changes", "code", "values"),
    [
        ({"field": {"element_bytes": 1}}, "element-bytes-differ", (2, 1)),
        ({"channel": {"size": 2, "stop": 2}}, "axis-size-differs", (4, 2)),
        ({"channel": {"name": "depth"}}, "axes-differ", (["channel", "head", "token"], ["depth", "head", "token"])),
        ({"head": {"split": "whole"}}, "split-differs", ("tp", "whole")),
    ],
)
def test_mismatches_name_both_values(changes, code, values):
    local = engine(model=DENSE)[0, 0]
    with refused(code, "peer", GeometryMismatch, local=values[0], peer=values[1]) as caught:
        plan_transfer(local, {(0, 0): changed(local, **changes)})
    assert repr(values[0]) in str(caught.value)
    assert repr(values[1]) in str(caught.value)


def test_groups_must_match():
    local = engine(model=DENSE)[0, 0]
    for kind, code in (("sliding-window", "group-kind-differs"), ("attention", "window-differs")):
        with refused(code, "peer", GeometryMismatch):
            plan_transfer(
                local, {(0, 0): replace(local, groups=(replace(local.groups[0], kind=kind, window_tokens=8),))}
            )


def test_missing_layers_fields_ranks_and_peers():
    local, wide = engine(2, DENSE)[0, 0], engine(4, DENSE)
    with refused("peer-missing", "peer", UnsupportedTopology, missing=[(0, 1)]):
        plan_transfer(local, {(0, 0): wide[0, 0]})
    with refused("layer-not-held", "peer", GeometryMismatch, layer="layers.1"):
        plan_transfer(engine(model=ModelSpec(("attention",) * 2, 4, 4))[0, 0], engine(model=DENSE))
    with refused("field-missing", "peer", GeometryMismatch, local=["index", "latent"]):
        indexed = ModelSpec(("latent",), latent_dim=4, index_dim=2)
        plan_transfer(engine(model=indexed)[0, 0], engine(model=replace(indexed, index_dim=0)))
    with refused("field-missing", "peer", GeometryMismatch, peer=["key"]):
        plan_transfer(rank(field(axis()), field(axis(), name="value", offset=8)), {(0, 0): rank(field(axis()))})
    with refused("peers-empty", "local", InvalidGeometry):
        plan_transfer(local, {})
    for peers, peer_tp in (
        ({(0, 1): wide[0, 0]}, None),
        (dict(wide), 8),
        ({(0, 0): wide[0, 0], (0, 1): engine(2, DENSE)[0, 1]}, None),
    ):
        with refused("peer-rank-differs", "peer", InvalidGeometry):
            plan_transfer(local, peers, peer_tp=peer_tp)
    with refused("rank-not-read", kind=UnsupportedTopology):
        plan_transfer(local, wide).indices((0, 3), lists([1]), lists([1]), tokens=1)
    with refused("no-producer-holds", "peer", UnsupportedTopology):
        plan_transfer(local, engine(4, DENSE, dcp=4))
    piped = replace(engine(model=DENSE2, pp=2)[0, 0], stage_layers=())
    with refused("stage-layers-missing", kind=UnsupportedTopology):
        plan_transfer(piped, engine(model=DENSE2))


def test_kernel_ordered_blocks_need_equal_pages():
    cpu = engine(model=DENSE, layout="cpu")
    assert len(plan_transfer(cpu[0, 0], cpu).peer_rows((0, 0))) == 1
    split = plan_transfer(engine(2, DENSE, layout="cpu")[0, 1], cpu)
    assert split.slices((0, 0))[0].columns.length.tolist() == [2 * 2 * 32 * 4 * 2]
    for other in (engine(model=DENSE, layout="cpu", block_tokens=64), engine(model=DENSE)):
        with refused("packing-differs"):
            plan_transfer(cpu[0, 0], other)
    halved = engine(model=DENSE, layout="cpu", block_tokens=64, kernel_block_tokens=32)
    assert plan_transfer(cpu[0, 0], halved).producer_ranks == ((0, 0),)
    for tokens in (48, 64):
        other = {(0, 0): replace(cpu[0, 0], groups=(Group("attention", tokens),))}
        for mine, theirs in ((other[0, 0], cpu), (cpu[0, 0], other)):
            with refused("packed-block-needs-equal-pages", kind=UnsupportedTopology):
                plan_transfer(mine, theirs)


def in_another_order(geometry):
    """The same rank with its groups numbered the other way round."""
    regions = tuple(
        replace(region, members=tuple(replace(m, group=len(geometry.groups) - 1 - m.group) for m in region.members))
        for region in geometry.regions
    )
    return replace(geometry, groups=geometry.groups[::-1], regions=regions)


def test_groups_may_be_numbered_otherwise():
    model = ModelSpec(("attention", "sliding", "attention"), 4, 4, window_tokens=32)
    local, peer = (engine(model=model, block_tokens=tokens)[0, 0] for tokens in (32, 16))
    same, other = plan_transfer(local, {(0, 0): peer}), plan_transfer(local, {(0, 0): in_another_order(peer)})
    mine, theirs = lists([1], [2, 3]), lists([4, 5], [6, 7, 8])
    expected = same.indices((0, 0), mine, theirs, tokens=32)
    found = other.indices((0, 0), mine, theirs[::-1], tokens=32)
    assert [side.tolist() for side in found] == [side.tolist() for side in expected]
    only = replace(local, groups=local.groups[:1], regions=tuple(r for r in local.regions if not r.members[0].group))
    found = plan_transfer(only, {(0, 0): in_another_order(peer)}).indices(
        (0, 0), lists([1]), lists([6, 7, 8], [4, 5]), tokens=32
    )
    assert [len(side) for side in found] == [2 * 4 * 2] * 2


def test_planner_speaks_documents():
    consumers, producers = engine(2, DENSE2), engine(4, DENSE2)
    planner = Planner()
    local = to_document(consumers[0, 1])
    assert list(planner.target_ranks(local, peer_tp=4, peer_pp=1, peer_dcp=1)) == [(0, 2), (0, 3)]
    plan = planner.plan(local, {rank: to_document(producers[rank]) for rank in ((0, 2), (0, 3))}, peer_tp=4)
    assert (plan.producer_ranks, plan.notify_only_ranks, plan.reader_count((0, 2))) == (((0, 2), (0, 3)), (), 1)
    request = lists([5, 1], first=32), lists([9, 3, 4])
    same = plan_transfer(consumers[0, 1], producers).indices((0, 2), *request, tokens=96)
    assert [side.tolist() for side in plan.indices((0, 2), *request, tokens=96)] == [side.tolist() for side in same]


@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_documents_survive_json(layout):
    model = MODEL if not layout.startswith("cross") else DENSE
    for geometry in engine(2, model, layout=layout, pp=2 if model is MODEL else 1).values():
        document = json.loads(json.dumps(to_document(geometry)))
        assert from_document(document) == geometry
        assert to_document(from_document(document)) == to_document(geometry)


def test_document_shares_layouts():
    document: Any = to_document(engine(model=ModelSpec(("attention",) * 64, 8, 128))[0, 0])
    assert len(document["layouts"]) == 1
    assert len(json.dumps(document)) < 12_000


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        (("version",), 2, "document-version"),
        (("schema",), "x", "document-version"),
        (("tp",), [1], "document-malformed"),
        (("tp",), "xx", "document-malformed"),
        (("tp", 0), True, "document-malformed"),
        (("null_block",), "0", "document-malformed"),
        (("groups",), None, "document-malformed"),
        (("groups", 0), 5, "document-malformed"),
        (("groups", 0, "kind"), 5, "document-malformed"),
        (("groups", 0, "context"), [1, 0], "document-malformed"),
        (("layouts", 0, 0, "axes", 0), ["token"], "document-malformed"),
        (("layouts", 0, 0, "axes", 0, 1), 1 << 80, "document-malformed"),
        (("layouts", 0, 0, "element_bytes"), 1.0, "document-malformed"),
        (("regions", 0, "members", 0, 1), 9, "document-malformed"),
        (("regions", 0, "members", 0, 1), -1, "document-malformed"),
        (("regions", 0, "members", 0, 0), "x" * 2000, "document-malformed"),
        (("regions", 0, "page_count"), 0, "size-out-of-range"),
        (("stages",), [[1]], "document-malformed"),
        *((("version",), other, "document-version") for other in (True, 1.0, "1", None)),
    ],
)
def test_bad_documents_are_refused(path, value, code):
    document = put(json.loads(json.dumps(to_document(engine()[0, 0]))), path, value)
    with refused(code, "local", InvalidGeometry):
        from_document(document)
    with refused(code, "peer", rank=(0, 0)):
        Planner().plan(to_document(engine()[0, 0]), {(0, 0): document}, peer_tp=1)


def test_defaults_of_a_document():
    document: Any = to_document(engine(model=DENSE)[0, 0])
    for group in document["groups"]:
        for key in ("context", "pages_per_block", "window_tokens"):
            del group[key]
    for region in document["regions"]:
        del region["memory_kind"], region["device"]
    del document["stage_layers"], document["null_block"]
    document["new key"] = object()
    assert from_document(document) == engine(model=DENSE)[0, 0]


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


GOOD = json.loads(json.dumps(to_document(engine(2)[0, 1])))
PLACES = list(places(GOOD))


@settings(max_examples=300 if LONG else 60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(PLACES), junk | st.integers(-2, 70)), min_size=1, max_size=3))
def test_any_document_is_an_answer_or_a_coded_refusal(changes):
    document = GOOD
    for path, value in changes:
        try:
            document = put(document, path, value)
        except (KeyError, IndexError, TypeError):
            continue
    local = to_document(engine()[0, 0])
    try:
        plan = Planner().plan(local, {(0, 0): to_document(engine(2)[0, 0]), (0, 1): document}, peer_tp=2)
        plan.indices((0, 1), lists([1], [2]), lists([1], [2]), tokens=16)
    except TopologyError:
        return
    rows = plan.peer_rows((0, 1))
    peer = from_document(document)
    low = min(region.base_address for region in peer.regions)
    high = max(r.base_address + (r.page_count - 1) * r.page_stride_bytes + r.page_bytes for r in peer.regions)
    for address, length, _, stride, count in rows.tolist():
        assert low <= address
        assert address + (count - 1) * stride + length <= high


MADE = engine(2)[0, 1]
PARTS = st.sampled_from([value for value in vars(MADE).values() if isinstance(value, tuple)])
STAGES = st.lists(
    st.builds(StageLayer, junk | st.text(max_size=3), junk | st.integers(-1, 2), junk | st.just(("key",))).map(tuple)
    | st.builds(StageLayer, junk | st.text(max_size=3), junk | st.integers(-1, 2), junk | st.just(("key",)))
    | junk,
    max_size=2,
).map(tuple)


@settings(max_examples=300 if LONG else 100, deadline=None)
@given(
    st.sampled_from([each.name for each in dataclasses.fields(RankGeometry)]),
    junk | st.lists(junk).map(tuple) | PARTS | STAGES.map(lambda layers: (layers,)) | st.integers(-2, 5),
)
@example("stage_layers", (("a",),))
@example("stage_layers", ((StageLayer("a", 0, cast("Any", "key")),),))
@example("tp_size", 2.0)
@example("groups", [*MADE.groups])
def test_a_field_of_any_value_makes_a_geometry_or_is_a_coded_refusal(name, value):
    """A geometry that is accepted has the declared types: its document, with a type for each value, makes an equal one."""
    try:
        changed = dataclasses.replace(MADE, **{name: value})
    except InvalidGeometry as error:
        assert error.code
        return
    assert from_document(json.loads(json.dumps(to_document(changed)))) == changed
