"""Configuration, mistakes of the caller, and what the state says about itself."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
from model.invariants import problems
from scheduler_helpers import begin, config, consumer_params, scheduler, with_ticket

from kv_scheduler_state import UNBOUND, GroupConfig, SchedulerStateError, TicketError, prefill_request_params
from kv_scheduler_state.errors import DuplicateRequest, IllegalTransition, InvalidConfig, InvalidEvent, UnknownRequest


@pytest.mark.parametrize(
    "changes",
    [
        {"engine_id": ""},
        {"host": ""},
        {"port": 0},
        {"tp": 0},
        {"groups": ()},
        {"state_backoff_tokens": -1},
        {"fence_slots": -1},
        {"lease_s": 0.0},
        {"readback_lease_s": math.inf},
        {"heartbeat_s": 30.0},
        {"fence_seed": 0},
        {"nonce_seed": ""},
        {"generation": -1},
        {"stream_reserve_fraction": 1.5},
        {"load_failure_policy": "recomput"},
        {"fence_seed": 1 << 53},
        {"bidirectional": True, "uses_host_buffer": True},
        {"peer_networks": ("10.0.0.0/99",)},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(changes):
    with pytest.raises(InvalidConfig) as caught:
        config(**changes)
    assert (caught.value.code, caught.value.fault, caught.value.is_retry_safe) == ("invalid-config", "local", False)


@pytest.mark.parametrize("setting", ["peer_networks", "unsealed_networks"])
def test_a_wrong_network_is_refused_by_the_name_of_its_setting(setting):
    with pytest.raises(InvalidConfig, match=rf"\A{setting}: '10\.0\.0\.1/8' names an address"):
        config(**{setting: ("10.0.0.1/8",)})


@pytest.mark.parametrize(
    "changes",
    [
        {"block_tokens": 0},
        {"kind": "State"},
        {"kind": "window"},
        {"window_tokens": 5},
        {"scratch_blocks": 1},
        {"chunk_tokens": -1},
        {"kind": "window", "window_tokens": 32, "chunk_tokens": 5},
        {"kind": "state", "scratch_blocks": -1},
    ],
)
def test_a_group_that_cannot_be_is_refused(changes):
    with pytest.raises(InvalidConfig):
        GroupConfig(**changes)


def mistakes(state):
    blocks = {"block_ids": [[1]], "new_block_ids": [[1]], "external_tokens": 0, "now_s": 0.0}
    end = {"reason": "abort", "block_ids": [[1]], "computed_tokens": 0, "identity": UNBOUND, "now_s": 0.0}
    yield lambda: state.arrive("", None, prompt_tokens=1, identity=UNBOUND, now_s=0.0)
    yield lambda: state.arrive(7, None, prompt_tokens=1, identity=UNBOUND, now_s=0.0)
    yield lambda: state.arrive("new", None, prompt_tokens=-1, identity=UNBOUND, now_s=0.0)
    yield lambda: state.arrive("new", None, prompt_tokens="1", identity=UNBOUND, now_s=0.0)
    yield lambda: state.arrive("new", None, prompt_tokens=1, identity=UNBOUND, now_s=-1.0)
    yield lambda: state.arrive("d1", None, prompt_tokens=1, identity=UNBOUND, now_s=0.0)
    yield lambda: state.external_tokens("d1", computed_tokens=-1)
    yield lambda: state.external_tokens(["d1"], computed_tokens=1)
    yield lambda: state.allocate("d1", **{**blocks, "external_tokens": -1})
    yield lambda: state.allocate("d1", **{**blocks, "external_tokens": True})
    yield lambda: state.allocate("d1", **{**blocks, "external_tokens": 1, "new_block_ids": [[1], [2]]})
    yield lambda: state.allocate("d1", **{**blocks, "external_tokens": 1, "block_ids": []})
    yield lambda: state.allocate("d1", **{**blocks, "now_s": math.nan})
    yield lambda: state.allocate("gone", **blocks)
    yield lambda: state.scheduled("gone", new_block_ids=[[1]], is_prompt_complete=True)
    yield lambda: state.scheduled("p1", new_block_ids=[], is_prompt_complete=True)
    yield lambda: state.preempt("gone", now_s=0.0)
    yield lambda: state.preempt("d1", now_s=0.0)
    yield lambda: state.finish("d1", **{**end, "reason": "tired"})
    yield lambda: state.finish("d1", **{**end, "computed_tokens": None})
    yield lambda: state.finish("p1", **{**end, "reason": "length", "block_ids": [[1], [2]]})
    yield lambda: state.finish("p1", **{**end, "now_s": "0"})
    yield lambda: state.finish("gone", **end)
    yield lambda: state.report(sent=["gone"], received=[], failed=[])
    yield lambda: state.report(sent=["d1"], received=["p1"], failed=[])
    yield lambda: state.report(sent=[["p1"]], received=[], failed=[])
    yield lambda: state.report(sent=[], received=[["d1"]], failed=[])
    yield lambda: state.take_step_plan(now_s=-1.0)
    yield lambda: state.take_step_plan(now_s=True)
    yield lambda: state.take_step_plan(now_s=10**400)
    yield lambda: state.explain("gone", now_s=0.0)
    yield lambda: state.snapshot(now_s=math.inf)


def test_a_mistake_is_coded_and_changes_nothing():
    state = scheduler()
    with_ticket(state)
    begin(state, "p1", [[1]])
    before = state.snapshot(now_s=0.0)
    for mistake in mistakes(state):
        with pytest.raises(SchedulerStateError) as caught:
            mistake()
        assert caught.value.code in {"invalid-event", "unknown-request", "duplicate-request", "illegal-transition"}
        assert dict(caught.value.context) is not None
        assert state.snapshot(now_s=0.0) == before
        assert problems(state) == []
    assert len(state.take_step_plan(now_s=0.0).expects) == 1


def test_messages_do_not_repeat_what_is_hostile():
    state = scheduler()
    with pytest.raises(UnknownRequest) as caught:
        state.explain("x" * 10_000, now_s=0.0)
    assert len(str(caught.value)) < 250
    with pytest.raises(InvalidEvent, match="now_s is a list"):
        state.take_step_plan(now_s=[0] * 10_000)
    with_ticket(state)
    with pytest.raises(InvalidEvent, match="a int"):
        state.external_tokens("d1", computed_tokens=-(10**400))


def test_a_snapshot_says_why_a_request_waits():
    state = scheduler()
    state.arrive("local", None, prompt_tokens=3, identity=UNBOUND, now_s=0.0)
    with_ticket(state, now_s=1.0)
    state.allocate("d1", block_ids=[[1, 2, 3]], new_block_ids=[[1, 2, 3]], external_tokens=48, now_s=3.0)
    local, consumer = state.snapshot(now_s=4.0)
    assert (local["role"], local["state"], local["age_s"]) == ("none", "running", 4.0)
    assert (consumer["role"], consumer["state"], consumer["age_s"]) == ("consumer", "reading", 3.0)
    assert consumer["waits_for"] == "the workers, to report the end of its read"
    assert consumer["consumer"]["is_renewed"]
    assert state.state_counts() == {"consumer-reading": 1}
    state.arrive("p1", prefill_request_params(), prompt_tokens=48, identity=UNBOUND, now_s=4.0)
    state.report(sent=[], received=["d1"], failed=[])
    assert state.state_counts() == {"consumer-local": 1, "producer-waiting": 1}


ERRORS = [
    SchedulerStateError("text", code="some-code", context={"a": 1}),
    IllegalTransition("consumer", "r", "queued", "done"),
    UnknownRequest("r", "sent"),
    DuplicateRequest("r", "queued"),
    InvalidEvent("text", tokens=3),
    InvalidConfig("text", limit="max"),
    TicketError("ticket-type", "text", field="kv_fence"),
]


def test_every_exception_is_copied_and_pickled_whole():
    assert {type(error) for error in ERRORS[1:]} == set(SchedulerStateError.__subclasses__())
    for error in ERRORS:
        for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
            assert type(again) is type(error)
            assert str(again) == str(error)
            assert vars(again) == vars(error)
            with pytest.raises(TypeError):
                again.context["a"] = 2  # type: ignore[index]


def test_a_ticket_is_not_changed_by_a_whole_life():
    params = consumer_params(remote_block_ids=[[1, 2, 3]])
    state = scheduler()
    state.arrive("d1", params, prompt_tokens=48, identity=UNBOUND, now_s=0.0)
    state.allocate("d1", block_ids=[[1, 2, 3]], new_block_ids=[[1, 2, 3]], external_tokens=48, now_s=0.0)
    params["remote_block_ids"][0].append(99)  # nor does what happens to it later matter
    assert state.take_step_plan(now_s=0.0).reads[0].ticket.peer_blocks[0].ids == (1, 2, 3)
