"""The shortest calls are the safe ones: prompts are bound, hand-overs fenced, and misspelt keys refused."""

from __future__ import annotations

import copy
import pickle

import pytest
from scheduler_helpers import SEEDS, consumer_params, hand_over, scheduler

from kv_scheduler_state import (
    UNBOUND,
    SchedulerConfig,
    SchedulerState,
    SchedulerStateError,
    TextPrompt,
    prefill_request_params,
    prompt_digest,
)
from kv_scheduler_state.ticket.reader import _KEYS

PROMPT = TextPrompt(range(48), lora="l", salt="s")


def test_the_shortest_config_hands_over_with_a_fence_and_bound():
    params = hand_over(
        SchedulerState(SchedulerConfig("p", "10.0.0.1", 5600, **SEEDS)), [[7, 8, 9]], identity=PROMPT
    ).params
    assert params["kv_fence"][0] == 0
    assert params["kv_prompt"] == prompt_digest(range(48), lora="l", salt="s")
    reader = SchedulerState(SchedulerConfig("d", "10.0.0.2", 5600, **SEEDS))
    for number, other in enumerate((TextPrompt(range(47)), TextPrompt(range(48)), UNBOUND)):
        admission = reader.arrive(f"d{number}", params, prompt_tokens=48, identity=other, now_s=0.0)
        assert admission.rejected_code == "ticket-prompt"
    assert reader.arrive("d", params, prompt_tokens=48, identity=PROMPT, now_s=0.0).role == "consumer"


def test_opting_out_of_binding_has_a_name():
    assert "kv_prompt" not in hand_over(scheduler(), [[7, 8, 9]], identity=UNBOUND).params
    state = scheduler()
    for wrong in (None, "prompt", 7, [1, 2], TextPrompt):
        with pytest.raises(SchedulerStateError, match="UNBOUND opts out") as caught:
            state.arrive("p1", prefill_request_params(), prompt_tokens=48, identity=wrong, now_s=0.0)
        assert caught.value.code == "invalid-event"
    assert state.live_count == 0
    for same in (copy.deepcopy(UNBOUND), pickle.loads(pickle.dumps(UNBOUND))):
        assert same is UNBOUND


MISSPELT = (
    "do_remote_decod do_remote_decodes do_remote_dec0de do_remote_decdoe Do_Remote_Decode do-remote-decode "
    "remote_block_id tp_sizes tp_siez kv_nonse KV_LEASE_S kv_streams"
)
OF_OTHERS = (
    "dp_size ep_size pcp_size transfer_id remote_hosts kv_load_tiers remote_notify_port remote_dp_rank remote_tp_size "
    "remote_block_size remote_bootstrap_addr max_offload_tokens disagg_spec ret_first_tok _p_side_truncated"
)


@pytest.mark.parametrize("key", MISSPELT.split())
def test_a_misspelt_key_is_refused_and_not_a_request_without_a_ticket(key):
    for params in ({key: True}, consumer_params(**{key: 1}), {**prefill_request_params(), key: None}):
        admission = scheduler().arrive("r", params, prompt_tokens=48, identity=PROMPT, now_s=0.0)
        assert (admission.role, admission.rejected_code) == ("none", "ticket-key")
        assert key in admission.rejected_message


@pytest.mark.parametrize("key", [*OF_OTHERS.split(), *sorted(_KEYS)])
def test_keys_of_other_hosts_and_known_keys_pass(key):
    assert scheduler().arrive("r", {key: None}, prompt_tokens=48, identity=PROMPT, now_s=0.0).rejected_code == ""


def test_the_text_of_an_error_ends_with_its_code_once_also_after_pickling():
    with pytest.raises(SchedulerStateError) as caught:
        scheduler().explain("r", now_s=0.0)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert str(error) == f"{error.message} (unknown-request)"
        assert "unknown-request" not in error.message
    assert (
        "(ticket-key)" not in scheduler().arrive("r", {"kv_nonse": 1}, prompt_tokens=1, identity=UNBOUND, now_s=0.0)[2]
    )


def test_objects_say_what_they_are():
    state = scheduler()
    hand_over(state, [[7, 8, 9]], identity=PROMPT)
    assert repr(state) == "SchedulerState('engine-0': 1 live requests, 1 leases, 1 of 4 fence slots used)"
