"""Staged plans: proved by the oracle, and chosen by the cost model."""

from itertools import product

import pytest

from kv_topology import CostModel, UnsupportedTopology, plan_transfer
from kv_topology._engine import EngineSpec, ModelSpec, StateSpec, build_engine
from kv_topology._proof_cases import ProofCase, request_for
from kv_topology.testing import prove

DENSE = ModelSpec(("attention",) * 2, 4, 8)
PAIRS = [
    (mine, theirs, tp, peer_tp, block, peer_block)
    for mine, theirs in product(("packed-HND", "packed-NHD", "halves-HND", "halves-NHD"), repeat=2)
    for tp, peer_tp in ((1, 1), (1, 2), (2, 4), (1, 3), (2, 2))
    for block, peer_block in ((16, 16), (48, 16))
]


def always(local, peers):
    return plan_transfer(local, peers, staging="always")


@pytest.mark.parametrize(("mine", "theirs", "tp", "peer_tp", "block", "peer_block"), PAIRS)
def test_staged_plans_move_the_right_bytes(mine, theirs, tp, peer_tp, block, peer_block):
    consumer = EngineSpec(tp, block_tokens=block, layout=mine, block_count=8)
    producer = EngineSpec(peer_tp, block_tokens=peer_block, layout=theirs, block_count=12)
    case = ProofCase("staged", DENSE, consumer, producer, 90, cached_blocks=1)
    proof = prove(build_engine(DENSE, consumer), build_engine(DENSE, producer), request_for(case), always)
    assert proof.bytes_proved > 0


def plan_of(mine, theirs, **options):
    local = build_engine(DENSE, EngineSpec(**mine))[0, 0]
    return plan_transfer(local, build_engine(DENSE, EngineSpec(**theirs)), **options)


def test_auto_stages_what_is_too_fine_and_only_that():
    same = plan_of({"layout": "packed-HND"}, {"layout": "packed-HND"}, staging="auto")
    assert not same.is_staged
    assert same.staged_regions == ()
    mixed = plan_of({"layout": "packed-HND"}, {"layout": "packed-NHD"}, staging="auto")
    assert mixed.is_staged
    assert len(mixed.peer_rows((0, 0))) == 2
    assert len(mixed.local_rows((0, 0))) == 2
    direct = plan_of({"layout": "packed-HND"}, {"layout": "packed-NHD"})
    assert not direct.is_staged
    assert len(direct.peer_rows((0, 0))) == 2 * 4 * 16
    assert direct.estimate.direct_descriptors_per_token == 2 * 4
    assert mixed.estimate.staged_descriptors_per_token == 2 / 16
    assert mixed.bytes_per_token == direct.bytes_per_token == 2 * 2 * 4 * 8 * 2


def test_the_cost_model_decides():
    free = CostModel(descriptor_us=0.0)
    plan = plan_of({"layout": "packed-HND"}, {"layout": "packed-NHD"}, staging="auto", cost=free)
    assert not plan.is_staged
    assert plan.estimate.staged_us > plan.estimate.direct_us
    dear = CostModel(descriptor_us=1.0, bandwidth_gb_s=1.0, permute_gb_s=2.0, permute_launch_us=10.0, prompt_tokens=160)
    plan = plan_of({"layout": "packed-HND"}, {"layout": "packed-NHD"}, staging="auto", cost=dear)
    moved = 160 * 256
    assert plan.estimate.direct_us == pytest.approx(160 * 8 * 1.0 + moved / 1e3)
    assert plan.estimate.staged_us == pytest.approx(160 / 8 + moved / 1e3 + 2 * 10.0 + moved / 2e3)


def test_what_cannot_be_staged_is_refused_or_stays_direct():
    state = StateSpec(heads=8, head_dim=4, state_dim=4)
    cases = [
        (ModelSpec(("latent",), latent_dim=8), {"tp": 2, "dcp": 2}, {"tp": 1}),
        (DENSE, {"tp": 2, "layout": "packed-HND"}, {"tp": 1, "layout": "packed-NHD"}),
    ]
    for model, mine, theirs in cases:
        local = build_engine(model, EngineSpec(**mine))[0, 0]
        peers = build_engine(model, EngineSpec(**theirs))
        with pytest.raises(UnsupportedTopology) as caught:
            plan_transfer(local, peers, staging="always")
        assert caught.value.code == "not-stageable"
        assert not plan_transfer(local, peers, staging="auto").is_staged
    hybrid = ModelSpec(("attention", "mamba2"), 4, 8, state=state)
    consumer, producer = EngineSpec(1, block_tokens=64, layout="packed-NHD"), EngineSpec(2, block_tokens=64)
    request = request_for(ProofCase("staged", hybrid, consumer, producer, 100))
    prove(build_engine(hybrid, consumer), build_engine(hybrid, producer), request, always)


def test_only_written_pages_are_permuted():
    plan = plan_of({"layout": "packed-HND"}, {"layout": "packed-NHD"}, staging="always")
    ((region, pages), _) = plan.staged_pages([[9, 4]], [[1, 2, 3]])
    assert pages.tolist() == [4, 9]
    assert (region.start, region.stop) == (0, 2 * 4 * 16 * 8 * 2)
