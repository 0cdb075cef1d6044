"""`vllm-adapter trace`: a timeline from answers of processes whose clocks have nothing in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_adapter.cli import main
from vllm_adapter.cli.trace import join_hand_overs, make_timeline, timeline_text
from vllm_adapter.observe.answers import StatusSocket

SHIFTS = {"P/scheduler": 1000.0, "P/0.0": -3.0, "D/scheduler": 0.0, "D/0.0": 52.5, "D/0.1": 9.0}
"""Seconds that each process's clock shows beyond the true time."""
WIRE_S = 0.0001
PREFILL = {"arrived": 0.010, "scheduled": 0.015, "answered": 0.100, "freed": 0.165}
DECODE = {
    "arrived": 0.112,
    "allocated": 0.113,
    "ordered": 0.114,
    "reported": 0.160,
    "scheduled": 0.170,
    "first_token": 0.200,
}
RANK = {
    "ordered": 0.115,
    "connected": 0.125,
    "planned": 0.127,
    "posted": 0.128,
    "started": 0.129,
    "data": 0.149,
    "fence": 0.150,
    "ended": 0.150,
    "taken": 0.152,
    "completed": 0.158,
}
FAST_RANK = {**RANK, "completed": 0.1525}
SOURCE = {"granted": 0.101, "read": 0.151, "freed": 0.153}


NAMES = {"P": "P", "D": "decode@10.0.0.1:5600"}


def announced(
    process: str, moments: Mapping[str, float], role: str, request_id: str, **facts: object
) -> dict[str, Any]:
    """Return a process's answer to a command whose clock runs 5000 s ahead of the true time."""
    engine_id, part = process.split("/")
    shift_s = SHIFTS[process]
    shown = {stage: moment + shift_s for stage, moment in moments.items()}
    return {
        "engine_id": engine_id,
        "name": NAMES[engine_id],
        "part": part,
        "desk": "desk",
        "asked_s": 5001.0 - WIRE_S,
        "heard_s": 1.0 + shift_s,
        "answered_s": 1.0 + shift_s,
        "received_s": 5001.0 + WIRE_S,
        "hand_overs": [{"request_id": request_id, "role": role, **facts, "moments": shown}],
    }


def answers() -> list[Any]:
    peer = {"peer_engine_id": "P", "peer_request_id": "p1"}
    return [
        announced("P/scheduler", PREFILL, "producer", "p1", frontend_s=0.010, tokens=512),
        announced("P/0.0", SOURCE, "producer", "p1"),
        announced("D/scheduler", DECODE, "consumer", "d1", frontend_s=0.004, tokens=512, **peer),
        announced("D/0.0", RANK, "consumer", "d1", bytes=4096, code="", **peer),
        announced("D/0.1", FAST_RANK, "consumer", "d1", bytes=4096, code="", **peer),
    ]


def timeline(found: list[Any], *, measured_s: float | None = None) -> Any:
    (hand_over,) = join_hand_overs(found)
    return make_timeline(hand_over, measured_s=measured_s)


def test_spans_are_the_true_durations_whatever_the_clocks_show() -> None:
    made = timeline(answers())
    durations = {(span["where"], span["name"]): round(1e3 * span["duration_s"], 1) for span in made["spans"]}
    assert durations == {
        ("prefill scheduler", "tokenize, pass on to the scheduler"): 10.0,
        ("prefill scheduler", "wait in the queue"): 5.0,
        ("prefill scheduler", "compute the prompt, write the ticket"): 85.0,
        ("outside", "router and HTTP"): 8.0,
        ("decode scheduler", "tokenize, pass on to the scheduler"): 4.0,
        ("decode scheduler", "wait for blocks"): 1.0,
        ("decode 0.0", "order to the rank"): 2.0,
        ("decode 0.0", "handshake (first contact)"): 10.0,
        ("decode 0.0", "plan, prepare lists (first contact)"): 2.0,
        ("decode 0.0", "number the blocks"): 1.0,
        ("decode 0.0", "wait for a place on the wire"): 1.0,
        ("decode 0.0", "read"): 20.0,
        ("decode 0.0", "check the fence"): 1.0,
        ("decode 0.0", "wait for the engine's step"): 2.0,
        ("decode 0.0", "put pages in order"): 6.0,
        ("decode scheduler", "report to the scheduler"): 2.0,
        ("decode scheduler", "wait for a step"): 10.0,
        ("decode scheduler", "first decode step"): 30.0,
    }
    assert made["total_s"] == pytest.approx(0.200, abs=2 * WIRE_S)
    assert made["unexplained_part"] == pytest.approx(0.0)
    assert all(value is not None and value <= 2 * WIRE_S + 1e-9 for value in made["clock_uncertainty_s"].values())
    beside = {(span["where"], span["name"]) for span in made["side_spans"]}
    assert ("decode 0.1", "read of another rank") in beside
    assert ("prefill 0.0", "lease, until its reader is done") in beside


def test_a_rank_on_another_machine_is_aligned_by_its_order_and_its_report() -> None:
    found = answers()
    found[3]["desk"] = "another"
    del found[1]["hand_overs"][0]["moments"]["read"]
    made = timeline(found)
    uncertain_s = made["clock_uncertainty_s"]["D/0.0"]
    assert uncertain_s == pytest.approx(0.0015 + 2 * WIRE_S), (
        "half of 1 ms down and 2 ms up, and both commands' exchanges"
    )
    assert made["total_s"] == pytest.approx(0.200, abs=2 * WIRE_S)
    assert all(span["is_named"] for span in made["spans"])


@pytest.mark.parametrize(
    ("measured_s", "part"), [(0.202, 0.0099), (0.250, 0.2), (0.180, 0.111)], ids=["near", "too long", "too short"]
)
def test_what_a_client_measured_beyond_the_spans_is_unexplained(measured_s: float, part: float) -> None:
    assert timeline(answers(), measured_s=measured_s)["unexplained_part"] == pytest.approx(part, abs=0.002)


@pytest.mark.parametrize(
    ("process", "stage"), [(0, "answered"), (0, "scheduled"), (2, "reported"), (3, "data"), (2, "scheduled")]
)
def test_a_moment_that_is_missing_leaves_its_time_unexplained(process: int, stage: str) -> None:
    found = answers()
    whole = timeline(found)
    del found[process]["hand_overs"][0]["moments"][stage]
    made = timeline(found)
    (unnamed,) = [span for span in made["spans"] if not span["is_named"]]
    assert unnamed["name"].startswith("not recorded: ")
    assert made["total_s"] - made["named_s"] == pytest.approx(unnamed["duration_s"])
    assert made["total_s"] == pytest.approx(whole["total_s"], abs=2 * WIRE_S)


def test_a_peer_that_was_known_has_no_handshake_and_a_full_prefix_hit_no_read() -> None:
    found = answers()
    for rank in (3, 4):
        for stage in ("connected", "planned"):
            del found[rank]["hand_overs"][0]["moments"][stage]
    made = timeline(found)
    assert not [span for span in made["spans"] if "first contact" in span["name"]]
    assert all(span["is_named"] for span in made["spans"])
    hit = found[:3]
    for stage in ("allocated", "ordered", "reported"):
        del hit[2]["hand_overs"][0]["moments"][stage]
    made = timeline(hit)
    assert [span["name"] for span in made["spans"]][-2:] == ["wait for a step", "first decode step"]
    assert all(span["is_named"] for span in made["spans"])


def test_without_the_prefill_engine_the_timeline_begins_at_decode() -> None:
    made = timeline(answers()[2:])
    assert made["spans"][0]["where"] == "decode scheduler"
    assert made["total_s"] == pytest.approx(0.200 - 0.108, abs=2 * WIRE_S)


# --------------------------------------------------------------------------------------------------- streamed hand-overs


STREAMED_DECODE = {
    "arrived": 0.013,
    "allocated": 0.020,
    "ordered": 0.021,
    "reported": 0.119,
    "scheduled": 0.121,
    "first_token": 0.150,
}
STREAMED_RANK = {
    "ordered": 0.022,
    "posted": 0.040,
    "started": 0.040,
    "whole": 0.098,
    "data": 0.108,
    "fence": 0.110,
    "ended": 0.110,
    "taken": 0.112,
    "completed": 0.117,
}
STREAMED_SOURCE = {"granted": 0.101, "read": 0.112, "freed": 0.113}


def streamed(decode: Mapping[str, float] = STREAMED_DECODE, rank: Mapping[str, float] = STREAMED_RANK) -> list[Any]:
    """Return answers after a router asked both engines at once: decode arrives long before prefill has answered."""
    peer = {"peer_engine_id": "P", "peer_request_id": "p1"}
    early = {"is_early": True, "is_streamed": True, "frontend_s": 0.002, "tokens": 512}
    return [
        announced("P/scheduler", PREFILL, "producer", "p1", frontend_s=0.010, tokens=512, is_early=True),
        announced("P/0.0", STREAMED_SOURCE, "producer", "p1"),
        announced("D/scheduler", decode, "consumer", "d1", **early, **peer),
        announced("D/0.0", rank, "consumer", "d1", bytes=4096, early_bytes=3072, code="", **peer),
    ]


def shown(made: Any) -> list[tuple[str, str, float]]:
    return [(span["where"], span["name"], round(1e3 * span["duration_s"], 1)) for span in made["spans"]]


TAKEN_UP = [
    ("decode 0.0", "check the fence", 2.0),
    ("decode 0.0", "wait for the engine's step", 2.0),
    ("decode 0.0", "put pages in order", 5.0),
    ("decode scheduler", "report to the scheduler", 2.0),
    ("decode scheduler", "wait for a step", 2.0),
    ("decode scheduler", "first decode step", 29.0),
]


def test_a_streamed_hand_over_waits_for_the_computation_and_the_last_blocks_alone() -> None:
    made = timeline(streamed())
    assert shown(made) == [
        ("prefill scheduler", "tokenize, pass on to the scheduler", 10.0),
        ("prefill scheduler", "wait in the queue", 5.0),
        ("prefill scheduler", "compute the prompt, which is read meanwhile", 83.0),
        ("decode 0.0", "read the last blocks", 10.0),
        *TAKEN_UP,
    ]
    assert made["total_s"] == pytest.approx(0.150, abs=2 * WIRE_S)
    assert made["unexplained_part"] == pytest.approx(0.0)
    beside = [(span["where"], span["name"], round(1e3 * span["duration_s"])) for span in made["side_spans"]]
    assert beside[:2] == [
        ("decode scheduler", "wait for the offer, and for blocks", 7),
        ("decode 0.0", "read while the prompt is computed", 58),
    ]
    assert (made["is_streamed"], made["bytes"], made["early_bytes"]) == (True, 4096, 3072)
    text = timeline_text(made)
    assert "streamed: 3072 bytes (75%) had arrived when" in text
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize(
    ("found", "total_s", "most_s"), [(answers(), 0.200, 0.010), (streamed(), 0.150, 0.006)], ids=["ticket", "offer"]
)
def test_two_machines_are_aligned_by_the_hand_over_itself(found: list[Any], total_s: float, most_s: float) -> None:
    """The command of each machine has a clock of its own; messages went both ways: the ticket or offer, and "read complete".

    With a ticket half of the router's 8 ms and the notification's 2 ms are uncertain, with an offer of its 5 ms and 4 ms.
    """
    for answer in found:
        if answer["engine_id"] == "P":
            answer["desk"] = "the other machine's"
            for name in ("asked_s", "received_s"):
                answer[name] += 12_345.0
    made = timeline(found)
    uncertain_s = made["clock_uncertainty_s"]["P/scheduler"]
    assert uncertain_s is not None
    assert 0.0005 < uncertain_s < most_s
    for span in made["spans"]:
        assert span["where"] != "outside" or abs(span["duration_s"] - 0.008) <= uncertain_s
    assert made["total_s"] == pytest.approx(total_s, abs=uncertain_s + 2 * WIRE_S)


@pytest.mark.parametrize("is_streamed", [True, False], ids=["by its progress", "by its final ticket"])
def test_a_prompt_that_was_finished_before_it_was_read_has_the_wait_and_the_read_in_its_way(is_streamed: bool) -> None:
    late = {**STREAMED_DECODE, "allocated": 0.103, "ordered": 0.104}
    rank = {**STREAMED_RANK, "ordered": 0.105, "posted": 0.106, "started": 0.106, "whole": 0.1055}
    if not is_streamed:
        del rank["whole"]
    found = streamed(late, rank)
    found[2]["hand_overs"][0]["is_streamed"] = is_streamed
    made = timeline(found)
    assert shown(made) == [
        ("prefill scheduler", "tokenize, pass on to the scheduler", 10.0),
        ("prefill scheduler", "wait in the queue", 5.0),
        ("prefill scheduler", "compute the prompt, write the ticket", 85.0),
        ("decode scheduler", "wait for the ticket, and for blocks", 3.0),
        ("decode 0.0", "order to the rank", 2.0),
        ("decode 0.0", "number the blocks", 1.0),
        ("decode 0.0", "wait for a place on the wire", 0.0),
        ("decode 0.0", "read", 2.0),
        *TAKEN_UP,
    ]
    assert made["unexplained_part"] == pytest.approx(0.0)


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def live(serve: Callable[..., StatusSocket]) -> list[StatusSocket]:
    """Processes of two engines that remember one hand-over."""
    sockets = []
    for answer in answers():
        fixed = {name: value for name, value in answer.items() if not name.endswith("_s") and name != "desk"}
        sockets.append(serve({}, str(answer["part"]), trace=lambda fixed=fixed: fixed))
    return sockets


def test_the_command_asks_both_engines_and_states_what_is_unexplained(
    live: list[StatusSocket], capsys: pytest.CaptureFixture[str]
) -> None:
    # The processes of this test share a clock, and the moments in their answers do not fit it: only text and codes count.
    main(["trace"])
    text = capsys.readouterr().out
    for part in (
        "prefill  request p1 of engine P",
        "decode   request d1 of engine decode@10.0.0.1:5600",
        "read",
        "is unexplained",
        "router and HTTP",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 130
    main(["trace", "p1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["prefill"] == {"engine_id": "P", "request_id": "p1", "is_known": True}
    assert found["bytes"] == 8192
    assert main(["trace", "--list"]) == 0
    assert capsys.readouterr().out == "decode@10.0.0.1:5600 d1 from P p1\n"
    assert main(["trace", "--ttft", "1000"]) == 1
    assert "is unexplained (more than 5%)" in capsys.readouterr().out


def test_answers_of_another_machine_come_from_a_file(
    live: list[StatusSocket], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for each in live[2:]:
        each.close()
    file = tmp_path / "prefill.json"
    assert main(["trace", "--save", str(file)]) == 3, "no decode engine is here"
    capsys.readouterr()
    for each in live:
        each.close()
    saved = [answer for answer in answers() if answer["engine_id"] == "D"]
    other = tmp_path / "decode.json"
    other.write_text(json.dumps(saved))
    main(["trace", "--with", str(file), "--with", str(other), "--json"])
    assert json.loads(capsys.readouterr().out)["prefill"]["is_known"]


def test_nothing_to_show_says_why(live: list[StatusSocket], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "nobody"]) == 3
    assert "no hand-over is meant by 'nobody'" in capsys.readouterr().err
    for each in live:
        each.close()
    assert main(["trace"]) == 3
    assert "no live engine found" in capsys.readouterr().err


def test_a_clock_is_read_when_the_request_is_heard_and_when_the_answer_leaves(
    live: list[StatusSocket], tmp_path: Path
) -> None:
    file = tmp_path / "saved.json"
    main(["trace", "--save", str(file)])
    for answer in json.loads(file.read_text()):
        # Both sides are in this process, so the four readings are of the same clock, in order.
        assert answer["asked_s"] <= answer["heard_s"] <= answer["answered_s"] <= answer["received_s"]
