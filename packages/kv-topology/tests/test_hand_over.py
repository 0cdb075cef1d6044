"""Hand-overs on paper: the arithmetic, the command, and the figures of other systems that it is held against."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kv_topology import CostModel
from kv_topology._tools._cli import main
from kv_topology._tools._hand_over import HandOverModel, Load, estimate, looks_per_step
from kv_topology._tools._hand_over_report import hand_overs
from kv_topology._tools._spec import load_spec, parse_spec
from kv_topology._tools._survey import survey

EXAMPLES = Path(__file__).parents[1] / "examples"
SCALE = EXAMPLES / "scale_8xh100.toml"
NONE = Load(0, 0)
SMALL = HandOverModel(prefill_tokens_s=1000, chunk_tokens=40)
WIRE = CostModel(descriptor_us=0, bandwidth_gb_s=0.1, prompt_tokens=100)
LOAD = Load(2.5e6, 0)


def test_the_worked_example():
    plain, streamed = estimate(SMALL, WIRE, LOAD, NONE, 1)
    assert plain.producer_hold_ms - SMALL.free_ms == pytest.approx(12 + 2 + 25)
    assert plain.wait_ms == pytest.approx(39 + 2.8 + 15)
    assert plain.consumer_hold_ms == pytest.approx(plain.wait_ms - 12)
    assert streamed.producer_hold_ms - SMALL.free_ms == pytest.approx(7.725)
    assert streamed.wait_ms == pytest.approx(7.725 + 2.8 + 15)
    assert (plain.most_in_flight_bytes, streamed.most_in_flight_bytes) == (2.5e6, 1e6)
    assert [plain.early_share, streamed.early_share] == pytest.approx([0, 0.8])
    assert [each.first_token_ms - each.wait_ms for each in (plain, streamed)] == pytest.approx([100, 100])
    assert streamed.consumer_hold_ms == pytest.approx(streamed.first_token_ms)


def test_a_wire_that_is_slower_than_the_prefill_leaves_more_for_the_end():
    slow = replace(WIRE, bandwidth_gb_s=0.02)  # 50 ms for what is computed in 40
    _, streamed = estimate(SMALL, slow, LOAD, NONE, 1)
    # Parts: 0-40 from 42.225 to 92.725 ms; 40-80, which is whole since 80 ms, to 143.225; 80-100 to 168.725.
    assert streamed.producer_hold_ms - SMALL.free_ms == pytest.approx(68.725)
    assert streamed.early_share == pytest.approx(0.4)
    slower = replace(
        WIRE, bandwidth_gb_s=0.01
    )  # the second part begins after the prefill's end, and is all that is left
    _, streamed = estimate(SMALL, slower, LOAD, NONE, 1)
    assert streamed.most_in_flight_bytes == pytest.approx(1.5e6)
    assert streamed.producer_hold_ms - SMALL.free_ms == pytest.approx(42.225 + 0.5 + 100 + 0.5 + 150 - 100)


def test_states_are_read_last_and_a_prompt_of_one_step_gains_the_way_through_the_router_alone():
    states = Load(1e6, 0)
    plain, streamed = estimate(SMALL, WIRE, LOAD, states, 1)
    without, without_streamed = estimate(SMALL, WIRE, LOAD, NONE, 1)
    assert plain.wait_ms - without.wait_ms == pytest.approx(10)
    assert streamed.wait_ms - without_streamed.wait_ms == pytest.approx(10)
    assert streamed.early_share == pytest.approx(0.8 * 2.5 / 3.5)
    plain, streamed = estimate(replace(SMALL, chunk_tokens=2048), WIRE, LOAD, NONE, 1)
    late = 100 / 32 / 2 + 2 * 0.8 + 0.5  # a look after a step of 100 ms, the table, posting
    assert plain.wait_ms - streamed.wait_ms == pytest.approx(12 + 2 - late)
    assert streamed.early_share == 0


def test_others_on_the_wire_share_it():
    plain, streamed = estimate(replace(SMALL, at_once=3), WIRE, LOAD, NONE, 1)
    assert plain.producer_hold_ms - SMALL.free_ms == pytest.approx(14 + 75)
    # 30 ms for what is computed in 40: the second step's part ends at 80 + 2.225 + 0.5 + 30 ms, the last one is there by then.
    assert streamed.producer_hold_ms - SMALL.free_ms == pytest.approx(112.725 + 0.5 + 15 - 100)


def test_looks_grow_apart_and_are_bounded_by_slots_and_peers():
    assert looks_per_step(SMALL, 10) == 20
    assert looks_per_step(SMALL, 16) == 32
    assert looks_per_step(replace(SMALL, poll_ms=20), 100) == 5
    few, many = (
        estimate(replace(SMALL, peers=peers), WIRE, LOAD, NONE, readers)[1] for peers, readers in ((10, 1), (512, 2))
    )
    assert few.looks_per_s == pytest.approx(10 * looks_per_step(SMALL, 40) / 0.04)
    assert many.looks_per_s == pytest.approx(few.looks_per_s / 10 * 64 * 2)
    assert estimate(SMALL, WIRE, LOAD, NONE, 1)[0].looks_per_s == 0


def test_descriptors_of_a_fresh_pool_are_runs():
    found = survey(load_spec(SCALE))
    rank, pools = hand_overs(found, HandOverModel())
    assert rank == (0, 7)
    (fresh, _), (fragmented, _) = pools["fresh"], pools["fragmented"]
    blocks = 131_072 / 16
    assert fragmented.wait_ms - fresh.wait_ms == pytest.approx((blocks - 1) * 80 * 2.5e-3)
    assert fresh.most_in_flight_bytes == 131_072 * 40_960


def test_ranks_that_share_a_producer_look_at_it_together():
    data = {"model": {"layers": 2, "kv_heads": 8, "head_dim": 64}, "consumer": {"tp": 4}, "producer": {"tp": 2}}
    found = survey(parse_spec(data, EXAMPLES))
    alone = survey(parse_spec({**data, "consumer": {"tp": 2}}, EXAMPLES))
    looks = [hand_overs(each, HandOverModel())[1]["fresh"][1].looks_per_s for each in (found, alone)]
    assert looks[0] == pytest.approx(2 * looks[1])
    uneven = survey(
        load_spec(EXAMPLES / "uneven_tp_and_layouts.toml")
    )  # both consumer ranks read from the middle one of three
    assert hand_overs(uneven, HandOverModel())[1]["fresh"][1].looks_per_s == pytest.approx(looks[0])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"speed": 1}, "no setting 'speed'"),
        ({"chunk_tokens": 0}, "hand_over.chunk_tokens is 0"),
        ({"prefill_tokens_s": 0}, "hand_over.prefill_tokens_s is 0"),
        ({"poll_ms": 0.0}, "hand_over.poll_ms is 0"),
        ({"at_once": 0}, "hand_over.at_once is 0"),
        ({"peers": "many"}, "hand_over.peers must be of type int"),
        (3, "hand_over must be a table"),
    ],
)
def test_a_wrong_section_is_refused(section, message, tmp_path, capsys):
    spec = tmp_path / "spec.json"
    spec.write_text(
        json.dumps({"model": {"layers": 1, "kv_heads": 1}, "consumer": {}, "producer": {}, "hand_over": section})
    )
    assert main(["plan", str(spec), "--estimate"]) == 2
    assert message in capsys.readouterr().err


def test_only_an_estimate_with_the_section_tells_of_hand_overs(capsys):
    assert main(["plan", str(SCALE), "--estimate", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["hand_over"]
    assert [(each["pool"], each["way"]) for each in told["hand_overs"]] == [
        (pool, way) for pool in ("fresh", "fragmented") for way in ("plain", "streamed")
    ]
    assert told["model"]["prefill_tokens_s"] == 12_000
    assert main(["plan", str(SCALE)]) == 0
    assert "streamed" not in capsys.readouterr().out
    assert main(["plan", str(EXAMPLES / "gqa_tp4_from_tp2.toml"), "--estimate", "--json"]) == 0
    assert "hand_over" not in json.loads(capsys.readouterr().out)
