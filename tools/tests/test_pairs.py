"""Plan of the benchmark of engine pairs, and their turns, on processes that do nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvdev.pairs.fleet import alone_spec, specs_of
from kvdev.pairs.measures import rest_shares
from kvdev.pairs.plan import KINDS, Case, Setting, comparisons, last_step_tokens, left_tokens, plan_of
from kvdev.pairs.turns import Turns, cpu_seconds, processes_of, states_of
from kvdev.steps import DevError
from vllm_adapter.config import load_settings

LONG = Case(1900)
DEFAULT, TCP = Setting("default", 256), Setting("tcp", 256)

# --------------------------------------------------------------------------------------------------------------- plan


def test_kinds_are_compared_with_vllms_own_and_a_new_way_with_ours() -> None:
    assert list(KINDS) == ["ours", "streamed", "vllm"]
    assert comparisons(["ours", "vllm"]) == [("ours", "vllm")]
    assert set(comparisons(["ours", "streamed", "vllm"])) == {
        ("ours", "vllm"),
        ("streamed", "ours"),
        ("streamed", "vllm"),
    }


def test_a_quick_run_is_small_and_the_gates_have_what_bounds_are_about() -> None:
    quick, gates = plan_of("quick", {}), plan_of("gates", {})
    assert (quick.settings, quick.cases) == ([DEFAULT], [Case(256), LONG])
    assert (quick.kinds, quick.rounds, quick.longest) == (["ours", "streamed", "vllm"], 3, 1900)
    assert gates.cases == [LONG, Case(1900, "held")]
    assert set(gates.settings) == {Setting(way, chunk) for way in ("default", "tcp") for chunk in (256, 112)}


def test_a_plan_takes_what_the_environment_says() -> None:
    said = {"TOKENS": "300,700", "PREFIXES": "new,held", "TRANSPORTS": "tcp", "ROUNDS": "9", "KINDS": "vllm"}
    plan = plan_of("quick", {f"KV_BENCH_{key}": value for key, value in said.items()})
    assert plan.cases == [Case(300), Case(700), Case(700, "held")]
    assert (plan.settings, plan.rounds, plan.kinds, plan.longest) == ([TCP], 9, ["vllm"], 700)


def test_the_pairs_take_turns_in_an_order_that_changes_with_the_round() -> None:
    said = {"TOKENS": "256", "ROUNDS": "3", "KINDS": "ours,vllm"}
    plan = plan_of("quick", {f"KV_BENCH_{key}": value for key, value in said.items()})
    order = [(number, kind) for number, _, kind in plan.steps()]
    assert order == [(0, "ours"), (0, "vllm"), (1, "vllm"), (1, "ours"), (2, "ours"), (2, "vllm")]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("TOKENS", "256,", "numbers from 1 to 2040"),
        ("TOKENS", "4000", "numbers from 1 to 2040"),
        ("ROUNDS", "0", "KV_BENCH_ROUNDS"),
        ("TRANSPORTS", "rdma", "of default, tcp"),
        ("KINDS", "theirs", "of ours, streamed, vllm"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_right(key: str, value: str, words: str) -> None:
    with pytest.raises(DevError, match=words):
        plan_of("quick", {f"KV_BENCH_{key}": value})


def test_tokens_that_a_held_prefix_leaves_and_that_the_last_step_finishes() -> None:
    assert [left_tokens(tokens) for tokens in (1900, 1920, 129, 128)] == [108, 128, 1, 128]
    assert [last_step_tokens(1900, chunk) for chunk in (256, 112, 100, 1900, 2048)] == [108, 108, 108, 1900, 1900]
    assert last_step_tokens(256, 112) == 128  # the last step begins at 224, within the block that begins at 128


def test_a_streamed_pair_streams_on_both_sides_from_hosts_that_its_list_covers() -> None:
    for config in (KINDS["streamed"].prefill, KINDS["streamed"].decode):
        settings, notes = load_settings(cast("dict[str, object]", config["kv_connector_extra_config"]))
        assert settings.streaming
        assert settings.remote_hosts == ("127.0.0.0/8",)
        assert not notes
    assert [kind.name for kind in KINDS.values() if kind.is_concurrent] == ["streamed"]


def test_engines_of_a_pair_differ_from_another_pairs_in_their_connector_alone() -> None:
    model = Path("model")
    ours, theirs = (specs_of(KINDS[name], TCP, model) for name in ("ours", "vllm"))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.arguments, mine.cpus, mine.environment) == (other.arguments, other.cpus, {"UCX_TLS": "tcp"})
        assert mine.kv_transfer is not None
        assert other.kv_transfer is not None
        assert mine.kv_transfer["kv_connector_module_path"] == "vllm_adapter"
        assert "kv_connector_module_path" not in other.kv_transfer
    lonely = alone_spec(TCP, model)
    assert (lonely.arguments, lonely.cpus, lonely.kv_transfer) == (ours[0].arguments, ours[0].cpus, None)


# --------------------------------------------------------------------------------------------------------------- turns

FAMILY = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); print(flush=True); time.sleep(60)"
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


class Group:
    """A process and its child in a group of their own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FAMILY, *SLEEPER], stdout=subprocess.PIPE, start_new_session=True
        )
        self.pid = self.process.pid
        self.process.stdout.readline()

    def signal_all(self, number: int) -> None:
        os.killpg(self.pid, number)

    def letters(self) -> set[str]:
        states = states_of(self.pid)
        assert len(states) == 2
        return set(states.values())


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made = [Group(), Group(), Group()]
    yield made
    for group in made:
        group.signal_all(signal.SIGKILL)
        group.process.wait()
        group.process.stdout.close()


def test_one_group_goes_on_and_every_process_of_the_others_stands_still(groups: list[Group]) -> None:
    turns = Turns()
    for name, group in zip("abc", groups, strict=True):
        turns.add(name, [group])
    for chosen in (1, 0, 2, 2):
        turns.only("abc"[chosen])
        for number, group in enumerate(groups):
            assert ("T" in group.letters()) is (number != chosen)
            assert len(group.letters()) == 1 or number == chosen
    turns.none()
    assert all(group.letters() == {"T"} for group in groups)
    turns.all()
    time.sleep(0.05)
    assert not any("T" in group.letters() for group in groups)
    with pytest.raises(KeyError, match="d"):
        turns.only("d")


def test_a_group_that_does_not_stop_is_told(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdev.pairs.turns._WITHIN_S", 0.1)
    deaf = SimpleNamespace(pid=groups[0].pid, signal_all=lambda _number: None)
    turns = Turns()
    turns.add("deaf", [deaf])
    turns.add("other", [groups[1]])
    with pytest.raises(TimeoutError, match=f"group {groups[0].pid}"):
        turns.only("other")


def test_processes_of_a_group_and_the_time_that_one_has_run(groups: list[Group]) -> None:
    assert len(processes_of(groups[0].pid)) == 2
    assert groups[0].pid in processes_of(groups[0].pid)
    before, until = cpu_seconds(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert 0.08 <= cpu_seconds(os.getpid()) - before <= 0.5
    assert cpu_seconds(2**22 + 1) == 0


def test_a_worker_at_rest_is_the_process_beside_the_server(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdev.pairs.measures._SETTLES_S", 0.0)
    monkeypatch.setattr("kvdev.pairs.measures._REST_S", 0.2)
    engines: Any = [SimpleNamespace(pid=group.pid, spec=SimpleNamespace(name="e")) for group in groups]
    shares = rest_shares(engines[:2])
    assert all(0 <= share < 0.05 for share in shares)
    lonely: Any = SimpleNamespace(pid=os.getpgid(os.getpid()) + 2**22, spec=SimpleNamespace(name="lonely"))
    with pytest.raises(DevError, match="lonely has no process"):
        rest_shares([lonely])
