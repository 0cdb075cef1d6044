"""Tickets: what is accepted, what is refused with which code, and that nothing a client writes raises or is changed."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model.invariants import problems
from scheduler_helpers import FULL, WINDOW, allocate, config, consumer_params, finish, scheduler

from kv_scheduler_state import (
    UNBOUND,
    BlockList,
    HandoffTicket,
    PeerAddress,
    TicketError,
    TicketReader,
    prefill_request_params,
)
from kv_scheduler_state.errors import InvalidConfig
from kv_scheduler_state.hosts import HostPolicy

READER = TicketReader(config())

# Append only. The second is what vLLM's own connector wrote at first, the third is what this package writes.
ACCEPTED = {
    "vllm 0.32": (
        consumer_params(),
        HandoffTicket(
            "handoff",
            PeerAddress("prefill-0", "10.0.0.1", 5600, tp=2),
            "cmpl-1",
            (BlockList((1, 2, 3)),),
            peer_tokens=48,
            transfer_mode="pull",
        ),
    ),
    "vllm 0.20": (
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": ((1, 2, 3),),
            "remote_engine_id": "3f0c",
            "remote_request_id": "cmpl-1",
            "remote_host": "localhost",
            "remote_port": 5600,
            "tp_size": 1,
        },
        HandoffTicket("handoff", PeerAddress("3f0c", "localhost", 5600), "cmpl-1", (BlockList((1, 2, 3)),)),
    ),
    "this project": (
        consumer_params(
            kv_lease_s=30.0, kv_fence=[3, 77], kv_generation=5, kv_dialect=14, remote_registration_generation=2
        ),
        HandoffTicket(
            "handoff",
            PeerAddress("prefill-0", "10.0.0.1", 5600, 2, 1, 1, generation=5, dialect=14),
            "cmpl-1",
            (BlockList((1, 2, 3)),),
            peer_tokens=48,
            lease_s=30.0,
            fence=(3, 77),
            transfer_mode="pull",
        ),
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_good_ticket_is_read_and_written_again(name):
    params, ticket = ACCEPTED[name]
    before = copy.deepcopy(params)
    assert READER.classify(params) == "handoff"
    assert READER.read(params, "handoff") == ticket
    assert params == before


@pytest.mark.parametrize("blocks", [(1, 0), (1,) * (1 << 20)], ids=["equal to bools", "as many as are read"])
def test_lists_at_the_limits_are_read(blocks):
    assert READER.read(consumer_params(remote_block_ids=[blocks]), "handoff").peer_blocks[0].ids == blocks


def test_unknown_keys_are_ignored():
    params = consumer_params()
    assert READER.read({**params, "router_hint": {"a": 1}}, "handoff") == READER.read(params, "handoff")


def test_the_routers_first_request_is_no_ticket():
    assert READER.classify(prefill_request_params()) == "prefill"
    assert READER.classify(None) == READER.classify({}) == READER.classify({"do_remote_decode": None}) == "none"


def test_a_readback_needs_blocks_and_the_configuration():
    params = consumer_params(do_remote_prefill=False, do_remote_decode=True)
    both = TicketReader(config(bidirectional=True))
    assert READER.classify(params) == "prefill"
    assert both.classify(params) == "readback"
    assert both.classify(prefill_request_params()) == "prefill"
    assert both.read(params, "readback").kind == "readback"


HOSTILE = [
    ("ticket-not-mapping", [1]),
    ("ticket-not-mapping", "do_remote_prefill"),
    ("ticket-too-large", {"do_remote_prefill": True, **{f"k{i}": i for i in range(64)}}),
    ("ticket-flags", {"do_remote_prefill": True, "do_remote_decode": True}),
    ("ticket-type", {"do_remote_prefill": 1}),
    ("ticket-type", {"do_remote_decode": "true"}),
    ("ticket-missing", {"do_remote_prefill": True}),
    ("ticket-missing", consumer_params(remote_host=None)),
    ("ticket-missing", consumer_params(remote_port=None)),
    ("ticket-missing", consumer_params(remote_block_ids=None)),
    ("ticket-type", consumer_params(remote_port="5600")),
    ("ticket-type", consumer_params(tp_size=[2])),
    ("ticket-type", consumer_params(remote_request_id=7)),
    ("ticket-type", consumer_params(remote_block_ids="123")),
    ("ticket-type", consumer_params(remote_block_ids=[7])),
    ("ticket-type", consumer_params(remote_block_ids=[{"0": 1}])),
    ("ticket-type", consumer_params(kv_lease_s="30")),
    ("ticket-type", consumer_params(kv_fence=[1])),
    ("ticket-type", consumer_params(kv_fence={"slot": 1})),
    ("ticket-type", {**consumer_params(), 7: "x"}),
    ("ticket-range", consumer_params(remote_port=0)),
    ("ticket-range", consumer_params(pp_size=10**400)),
    ("ticket-range", consumer_params(remote_num_tokens=-1)),
    ("ticket-range", consumer_params(kv_lease_s=float("nan"))),
    ("ticket-range", consumer_params(kv_lease_s=float("inf"))),
    ("ticket-range", consumer_params(remote_blocks_expiry_time=10**400)),
    ("ticket-range", consumer_params(kv_fence=[0, 0])),
    ("ticket-range", consumer_params(kv_fence=[-1, 1])),
    ("ticket-range", consumer_params(kv_fence=[True, 1])),
    ("ticket-range", consumer_params(kv_fence=[0, 1.0])),
    ("ticket-text", consumer_params(remote_engine_id="")),
    ("ticket-text", consumer_params(remote_request_id="a" * 513)),
    ("ticket-text", consumer_params(remote_request_id="a\nb")),
    ("ticket-text", consumer_params(remote_engine_id="\ud800")),
    ("ticket-blocks", consumer_params(remote_block_ids=[[1, -2]])),
    ("ticket-blocks", consumer_params(remote_block_ids=[[1, True]])),
    ("ticket-blocks", consumer_params(remote_block_ids=[[1, 2.0]])),
    ("ticket-blocks", consumer_params(remote_block_ids=[[1 << 32]])),
    ("ticket-groups", consumer_params(remote_block_ids=[[1], [2]])),
    ("ticket-groups", consumer_params(remote_block_ids=[])),
    ("ticket-too-large", consumer_params(remote_block_ids=[list(range((1 << 20) + 1))])),
    ("ticket-empty", consumer_params(remote_block_ids=[[]])),
    ("ticket-mode", consumer_params(transfer_mode="push")),
    ("ticket-mode", consumer_params(transfer_mode=["pull"])),
    ("ticket-host", consumer_params(remote_host="a b")),
    ("ticket-host", consumer_params(remote_host="10.0.0.1;tcp://evil")),
    ("ticket-host", consumer_params(remote_host="0.0.0.0")),
    ("ticket-host", consumer_params(remote_host="[::]")),
    ("ticket-host", consumer_params(remote_host="-" * 300)),
]


@pytest.mark.parametrize(("code", "params"), HOSTILE)
def test_a_bad_ticket_means_a_local_prefill_with_a_reason(code, params):
    state = scheduler()
    with pytest.raises(TicketError) as caught:
        READER.read(params, "handoff") if READER.classify(params) == "handoff" else None
    assert caught.value.code == code
    assert caught.value.fault == "peer"
    assert len(str(caught.value)) < 400

    admission = state.arrive("d1", params, prompt_tokens=48, identity=UNBOUND, now_s=0.0)
    assert (admission.role, admission.rejected_code) == ("none", code)
    assert state.external_tokens("d1", computed_tokens=0) == 0
    allocate(state, "d1", [[1]])
    assert state.take_step_plan(now_s=0.0).is_empty
    assert state.explain("d1", now_s=1.0)["rejected_code"] == code
    assert not finish(state, "d1", "stop", [[1]], 49, now_s=1.0).keep_blocks
    assert state.live_count == 0


def test_types_count_even_after_an_equal_value_was_accepted():
    reader = TicketReader(config())
    reader.read(consumer_params(tp_size=1), "handoff")
    with pytest.raises(TicketError, match="tp_size is True"):
        reader.read(consumer_params(tp_size=True), "handoff")


NETWORKS = ("10.1.0.0/16", "fd00::/8")


@pytest.mark.parametrize(
    ("host", "networks", "is_allowed"),
    [
        ("10.1.2.3", (), True),
        ("10.1.2.3", NETWORKS, True),
        ("10.2.0.1", NETWORKS, False),
        ("::ffff:10.1.2.3", NETWORKS, True),
        ("::ffff:192.168.0.1", NETWORKS, False),
        ("[fd00::1]", NETWORKS, True),
        ("prefill.local", NETWORKS, False),
        # Addresses of one link are allowed by name alone.
        ("169.254.169.254", (), False),
        ("169.254.169.254", ("0.0.0.0/0",), False),
        ("169.254.169.254", ("169.254.0.0/16",), True),
        ("::ffff:169.254.169.254", (), False),
        ("fd00:ec2::254", ("fd00::/8",), False),
        ("fe80::1", (), False),
        ("fe80::1", ("fe80::/64",), True),
        ("fe80::1%eth0", ("fe80::/64",), False),
        ("::ffff:127.0.0.1%1]:0;[127.0.0.77", ("127.0.0.1/32",), False),
    ],
)
def test_a_ticket_points_only_where_it_may(host, networks, is_allowed):
    policy = HostPolicy(networks)
    if is_allowed:
        policy.require(host)
    else:
        with pytest.raises(TicketError) as caught:
            policy.require(host)
        assert caught.value.code == "ticket-host"


SPELLINGS = {
    "10.0.0.1": ("10.0.0.1", "::ffff:10.0.0.1", "::FFFF:A00:1", "0:0:0:0:0:ffff:10.0.0.1", "[::ffff:a00:1]"),
    "fd00::1": ("fd00::1", "FD00::1", "fd00:0:0::1", "fd00:0000::0001", "[fd00::1]", "fd00::0.0.0.1"),
    "node-1.example": ("node-1.example",),
}


@pytest.mark.parametrize(("host", "spelling"), [(host, each) for host, all_ in SPELLINGS.items() for each in all_])
def test_an_engine_has_one_address_however_a_ticket_spells_it(host, spelling):
    ticket = TicketReader(config()).read(consumer_params(remote_host=spelling), "handoff")
    assert ticket.peer == TicketReader(config()).read(consumer_params(remote_host=host), "handoff").peer
    assert ticket.peer.host == host


def test_ports_have_a_range():
    policy = HostPolicy(ports=(5600, 5699))
    policy.require_port(5600)
    policy.require_port(5699)
    for port in (5599, 5700):
        with pytest.raises(TicketError, match="peer_ports"):
            policy.require_port(port)
    for ports in ((0, 9), (9, 8), (1, 65536)):
        with pytest.raises(InvalidConfig, match="peer_ports"):
            HostPolicy(ports=ports)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=6), children, max_size=4),
    max_leaves=12,
)
KEYS = list(ACCEPTED["this project"][0])


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4), st.sets(st.sampled_from(KEYS), max_size=2))
def test_whatever_a_client_writes_is_a_role_or_a_coded_refusal(changes, missing):
    params = {key: value for key, value in {**ACCEPTED["this project"][0], **changes}.items() if key not in missing}
    before = repr(params)
    state = scheduler(groups=(FULL,), bidirectional=True)
    admission = state.arrive("d1", params, prompt_tokens=48, identity=UNBOUND, now_s=0.0)
    assert admission.role in {"none", "producer", "consumer"}
    assert bool(admission.rejected_code) == bool(admission.rejected_message)
    assert not admission.rejected_code or admission.rejected_code.startswith("ticket-")
    assert repr(params) == before
    assert problems(state) == []


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_any_json_at_all_is_a_role_or_a_coded_refusal(params):
    state = scheduler(groups=(FULL, WINDOW))
    assert state.arrive("d1", params, prompt_tokens=1, identity=UNBOUND, now_s=0.0).role == "none"


def test_peers_are_forgotten_before_they_fill_the_memory():
    reader = TicketReader(config())
    for index in range(1100):
        reader.read(consumer_params(remote_engine_id=f"e{index}", remote_host=f"h{index}"), "handoff")
    assert len(reader._peers) <= 1024
