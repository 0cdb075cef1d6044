"""Sealed tickets: an honest one survives every router, and a changed one is refused before it is acted upon."""

from __future__ import annotations

import copy
import hmac
import json
import logging
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scheduler_helpers import FULL, SEEDS, STATE, WINDOW, allocate, config, consumer_params, hand_over
from stream_helpers import Prompt

from kv_scheduler_state import LeaseTable, SchedulerConfig, SchedulerState, SchedulerStateError, TicketReader
from kv_scheduler_state.errors import InvalidConfig
from kv_scheduler_state.ticket.seal import TicketSeal, _without_doubles, canonical_ticket

SECRET, OTHER, NEXT = b"a fleet secret, 16+", b"the secret of another fleet", b"the secret after a rotation"
VECTORS = json.loads((Path(__file__).parent / "data" / "seals.json").read_text())
GROUPS = (FULL, WINDOW, STATE)
SHAPES = [((FULL,), [[7, 8, 9]]), ((FULL, WINDOW), [[7, 8, 9], [4, 5, 6]]), (GROUPS, [[7, 8, 9], [4, 5, 6], [3]])]


def prefill(secrets=(SECRET,), **changes):
    base = {"engine_id": "p0", "generation": 5, "dialect": 15, "null_block": 0}
    return SchedulerState(config(**{**base, **changes}), secrets=secrets)


def decode(secrets=(SECRET,), **changes):
    return SchedulerState(
        SchedulerConfig("d0", "10.0.0.2", 5600, null_block=0, **{**SEEDS, **changes}), secrets=secrets
    )


def ticket_of(state, blocks, request_id="p1"):
    return hand_over(state, blocks, tokens=47, prompt_tokens=48, identity=Prompt(), name=request_id).params


def admitted(state, params, request_id="d1", prompt=None):
    return state.arrive(request_id, params, prompt_tokens=48, identity=prompt or Prompt(), now_s=0.0)


def code_of(params, **changes):
    state = decode(**changes)
    admission = admitted(state, params)
    if admission.role != "consumer":
        assert state.external_tokens("d1", computed_tokens=0) == 0, "a refused ticket is computed locally"
        assert state.take_step_plan(now_s=0.0).is_empty, "nothing of a refused ticket reaches a worker"
    return admission.rejected_code


def test_without_a_secret_nothing_is_sealed_and_nothing_required():
    params = ticket_of(prefill(secrets=()), [[7, 8, 9]])
    assert "kv_seal" not in params
    assert code_of(params, secrets=()) == ""
    assert code_of(ticket_of(prefill(), [[7, 8, 9]]), secrets=()) == "", "an engine without a secret ignores seals"


def as_doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_doubles(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_doubles(each) for each in value]
    return float(value) if type(value) is int else value


ROUTERS = {
    "as it is": lambda params: params,
    "another order": lambda params: dict(reversed(params.items())),
    "added keys": lambda params: {"router_hint": {"a": [1]}, **params, "x": None},
    "doubles": as_doubles,
    "whole doubles": lambda params: {**params, "kv_lease_s": int(params["kv_lease_s"])},
    "no empty keys": lambda params: {key: each for key, each in params.items() if each is not None},
    "tuples": lambda params: {key: tuple(each) if isinstance(each, list) else each for key, each in params.items()},
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("groups", "blocks"), SHAPES)
def test_a_router_does_not_break_a_seal(groups, blocks, router):
    given = ROUTERS[router](ticket_of(prefill(groups=groups), blocks))
    before = copy.deepcopy(given)
    assert code_of(json.loads(json.dumps(given)), groups=groups) == ""
    assert code_of(given, groups=groups) == ""
    assert given == before


@pytest.mark.parametrize("key", ["x", "remote_block_ids"])
def test_doubles_cost_nothing_beyond_what_a_ticket_may_hold(key):
    big = [list(range(10**6))] * 3
    whole = _without_doubles({"remote_port": 5600.0, key: big})
    assert whole["remote_port"] == 5600
    assert whole[key] is big


def test_doubles_are_only_taken_where_a_seal_holds():
    params = as_doubles(ticket_of(prefill(), [[7, 8, 9]]))
    assert code_of({**params, "remote_port": 5601.0}) == "ticket-seal"
    assert code_of({**params, "remote_port": 5600.5}) == "ticket-type"
    del params["kv_seal"]
    assert code_of(params, secrets=()) == "ticket-type"


def others(value):
    """Return other values of a key that a reader would take, or could be made to take."""
    if isinstance(value, str):
        return ["0" + value[1:] if value[:1] != "0" else "1" + value[1:], value[:-1], value + "0", None]
    if isinstance(value, list):
        changed = [
            [*value[:index], other, *value[index + 1 :]]
            for index, each in enumerate(value)
            for other in (others(each) if isinstance(each, list) else [each + 1])
        ]
        return [*changed, value[:-1], value[::-1] if value[::-1] != value else None, [*value, 9]]
    return [7.0, 1] if value is None else [value + 1, value * 2 + 1, None]


@pytest.mark.never_wrong("A7")
@pytest.mark.parametrize(("groups", "blocks"), SHAPES)
def test_every_field_that_is_acted_upon_is_sealed(groups, blocks):
    params = ticket_of(prefill(groups=groups), blocks)
    reader = TicketReader(SchedulerConfig("d0", "10.0.0.2", 5600, null_block=0, groups=groups, **SEEDS))
    honest, refused = reader.read(params, "handoff"), 0
    for key in set(params) - {"do_remote_prefill", "do_remote_decode", "remote_registration_generation"}:
        for other in others(params[key]):
            forgery = {**params, key: other}
            if code_of(forgery, groups=groups):
                refused += 1
            else:
                assert reader.read(forgery, "handoff") == honest, f"{key} changed what is acted upon"
    assert refused >= 40


def test_a_seal_of_one_direction_is_none_of_the_other():
    state = decode(bidirectional=True)
    params = ticket_of(prefill(), [[7, 8, 9]])
    back = {**params, "do_remote_prefill": False, "do_remote_decode": True}
    admission = admitted(state, back)
    assert (admission.role, admission.rejected_code) == ("producer", "ticket-seal")


def test_a_readback_ticket_is_sealed_and_verified():
    first = ticket_of(prefill(), [[7, 8, 9]])
    state = decode(bidirectional=True, fence_slots=4)
    blocks, prompt = [[1, 2, 3, 4]], Prompt()
    admitted(state, first)
    allocate(state, "d1", blocks, external=47)
    state.report(sent=[], received=["d1"], failed=[])
    back = state.finish("d1", reason="stop", block_ids=blocks, computed_tokens=60, identity=prompt, now_s=0.1).params
    assert back is not None
    assert back["do_remote_decode"] is True
    for given, code in ((back, ""), ({**back, "remote_num_tokens": 61}, "ticket-seal")):
        admission = prefill(bidirectional=True).arrive("p2", given, prompt_tokens=200, identity=prompt, now_s=0.0)
        assert (admission.role, admission.rejected_code) == ("producer", code)


def test_secrets_rotate_without_a_refused_ticket():
    steps = (SECRET,), (SECRET, NEXT), (NEXT, SECRET), (NEXT,)
    for one, other in pairwise(steps):
        for writer, reader in ((one, other), (other, one)):
            assert code_of(ticket_of(prefill(writer), [[7, 8, 9]]), secrets=reader) == "", (writer, reader)
    assert code_of(ticket_of(prefill(steps[0]), [[7, 8, 9]]), secrets=steps[-1]) == "ticket-seal"


@pytest.mark.parametrize("secrets", [(b"short",), (SECRET, b""), ("s" * 16,)])
def test_a_short_secret_is_refused_and_changes_nothing(secrets):
    state = decode()
    with pytest.raises(SchedulerStateError) as caught:
        state.set_secrets(secrets)
    assert caught.value.code == "invalid-config"
    assert SECRET.decode() not in str(caught.value)
    with pytest.raises(SchedulerStateError):
        state.set_secrets(())
    assert admitted(state, ticket_of(prefill(), [[7, 8, 9]])).rejected_code == ""


@pytest.mark.parametrize(
    ("host", "networks", "code"),
    [
        ("10.0.0.1", (), "ticket-seal"),
        ("10.0.0.1", ("10.0.0.0/24",), ""),
        ("10.0.1.1", ("10.0.0.0/24",), "ticket-seal"),
        ("prefill.local", ("10.0.0.0/24",), "ticket-seal"),
        (None, ("10.0.0.0/24",), "ticket-seal"),
        (["10.0.0.1"], ("10.0.0.0/24",), "ticket-seal"),
    ],
)
def test_the_configuration_decides_who_needs_no_seal(host, networks, code):
    params = consumer_params(remote_host=host)
    assert code_of(params, unsealed_networks=networks) == code


def test_a_bad_seal_is_refused_where_none_is_needed():
    params = {**ticket_of(prefill((OTHER,)), [[7, 8, 9]])}
    assert code_of(params, unsealed_networks=("10.0.0.0/8",)) == "ticket-seal"
    assert code_of(consumer_params(kv_seal=""), unsealed_networks=("10.0.0.0/8",)) == "ticket-seal"


@pytest.mark.parametrize("seal", ["", "0" * 64, "é" * 64, 7, ["a"], {}, True, 1.5, "0" * 100_000])
def test_a_seal_of_any_kind_is_an_answer(seal):
    assert code_of({**ticket_of(prefill(), [[7, 8, 9]]), "kv_seal": seal}) == "ticket-seal"


def test_no_secret_is_shown(caplog):
    caplog.set_level(logging.DEBUG)
    state = decode(nonce_seed="seed that nobody sees")
    seal = state._producers.seal
    shown = [repr(seal), repr(state.config), repr(state.snapshot(now_s=0.0))]
    admission = admitted(state, ticket_of(prefill((OTHER,)), [[7, 8, 9]]))
    shown += [admission.rejected_message, repr(state.explain("d1", now_s=0.0)), caplog.text]
    for text in shown:
        assert all(word not in text for word in (SECRET.decode(), SECRET.hex(), "seed that nobody sees"))
    for value in (seal, state):
        with pytest.raises(TypeError):
            pickle.dumps(value)


@pytest.mark.parametrize("host", ["10.0.0.1", "::ffff:10.0.0.1", "FD00::0:1", "[fd00::1]", "Node-1.example"])
def test_a_seal_holds_for_the_host_as_its_engine_spells_it(host):
    ticket = ticket_of(prefill(host=host), [[1, 2, 3]])
    assert code_of(ticket) == ""
    for other in ("10.0.0.1", "::ffff:10.0.0.1", "::FFFF:a00:1", "fd00::1", "fd00:0::1", "node-1.example"):
        if other != host:
            assert code_of({**ticket, "remote_host": other}) == "ticket-seal"


@pytest.mark.parametrize("name", VECTORS)
def test_golden_seals(name):
    vector = VECTORS[name]
    groups = tuple({"full": FULL, "window": WINDOW, "state": STATE}[kind] for kind in vector["groups"])
    reader = TicketReader(
        SchedulerConfig("d0", "10.0.0.2", 5600, null_block=0, groups=groups, bidirectional=True, **SEEDS)
    )
    params = vector["ticket"]
    kind = reader.classify(params)
    assert kind == "handoff" or kind == "readback"  # noqa: PLR1714  (a form that type checkers follow)
    ticket = reader.read(params, kind)
    message = canonical_ticket(ticket, params["remote_host"])
    assert message.hex() == vector["bytes"]
    assert hmac.digest(vector["secret"].encode(), message, "sha256").hex() == params["kv_seal"]
    assert TicketSeal([vector["secret"].encode()]).opened(reader, params, kind) == ticket


def test_the_example_of_the_layout_is_true():
    params = consumer_params(
        remote_engine_id="p0", remote_request_id="r", kv_nonce="n", kv_first_tokens=[0], kv_span_tokens=[16]
    )
    ticket = TicketReader(config()).read(params, "handoff")
    assert len(canonical_ticket(ticket, ticket.peer.host)) == 228


@pytest.mark.parametrize("is_early", [False, True])
def test_with_nonces_required_no_stranger_ends_or_renews_a_lease(is_early):
    leases = LeaseTable(requires_nonces=True, max_pause_s=1e9)
    leases.expect("p1", now_s=0.0)

    def stranger():
        assert not leases.renew("p1", now_s=0.0)
        return leases.read_complete("p1", reader="x", reader_count=1, now_s=0.0)

    if is_early:
        stranger()
    leases.grant("p1", lease_s=30.0, fence=None, nonce="n", now_s=0.0)
    if not is_early:
        assert stranger() == "stale"
        assert leases.read_complete("p1", reader="x", reader_count=1, nonce="m", now_s=0.0) == "stale"
    assert leases.take_ended(now_s=0.0) == ()
    assert leases.read_complete("p1", reader="d", reader_count=1, nonce="n", now_s=0.0) == "complete"


def test_a_wrong_network_without_seals_is_refused_by_the_name_of_its_setting():
    with pytest.raises(InvalidConfig, match=r"\Aunsealed_networks: 'nowhere' is not a network"):
        TicketSeal([OTHER], ("nowhere",))
