"""The seam to NIXL, over a stand-in module: what it finds, passes on, normalises and codes."""

import enum
import os
import subprocess
import sys
import types
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import code_of

from kv_nixl_agent import AgentError, open_nixl
from kv_nixl_agent.nixl import binding as nixl_binding
from kv_nixl_agent.nixl import side_effects
from kv_nixl_agent.nixl.binding import NixlBinding, find_nixl

OPEN_MORE = """
import os, resource, sys
from kv_nixl_agent.nixl.binding import descriptors_left
used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1 + int(sys.argv[1]), 4096))
left = descriptors_left()
opened = 0
try:
    while True:
        os.dup(0)
        opened += 1
except OSError:
    print(left == opened, descriptors_left())
"""
ONE = np.zeros(1, dtype=np.int32)
ROWS = np.array([[4096, 8, 0, 8, 3]], dtype=np.uint64)


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - NIXL's spelling
    """Named as NIXL names it."""


class SyncMode(enum.Enum):
    NIXL_THREAD_SYNC_RW = 1


class NixlHandle:
    """Prepared list or transfer; the real one holds its agent."""


class StandIn:
    """Enough of `nixl_agent`; `answers` overrides what a method returns or raises."""

    def __init__(self, name, config):
        self.name, self.config, self.backends, self.calls = name, config, {}, []
        self.answers = {"prep_xfer_dlist": NixlHandle, "make_prepped_xfer": NixlHandle}

    def __getattr__(self, method):
        def call(*arguments):
            self.calls.append((method, arguments))
            answer = self.answers.get(method)
            if isinstance(answer, Exception):
                raise answer
            return answer() if isinstance(answer, type) else answer

        return call

    def get_plugin_list(self):
        return ["UCX"]

    def get_plugin_params(self, backend):
        return {"num_workers": "1"}

    def create_backend(self, backend, parameters):
        if parameters.get("num_workers") == "bad":
            raise RuntimeError("no")
        self.backends[backend] = parameters

    def get_backend_params(self, backend):
        return self.backends[backend]


@pytest.fixture
def module(monkeypatch):
    stand_in: Any = types.ModuleType("nixl")
    stand_in.nixl_agent = StandIn
    stand_in.nixl_agent_config = lambda **given: given
    stand_in.nixl_thread_sync_t = SyncMode
    monkeypatch.setitem(sys.modules, "nixl", stand_in)
    return stand_in


def open_one(**parameters: str) -> tuple[Any, Any]:
    binding: Any = open_nixl("me", [("UCX", parameters)], progress_thread=False)
    return binding, binding._agent


def handles(binding, count):
    return [binding.prepare(None, "DRAM", ROWS) for _ in range(count)]


class Configuration:
    """NIXL's own configuration object; its Python package sets no delay of the progress thread, that is zero."""

    pthrDelay = 0  # noqa: N815 - NIXL's spelling


def test_the_progress_thread_is_made_to_sleep_between_events(monkeypatch):
    extension: Any = types.ModuleType("nixl._bindings")
    extension.nixlAgent = lambda _name, configuration: configuration
    extension.READ = 7
    seen = []

    class Agent(StandIn):
        def __init__(self, name, config):
            super().__init__(name, config)
            bindings: Any = sys.modules["nixl"]
            seen.append((bindings.nixlBind.nixlAgent(name, Configuration()).pthrDelay, bindings.nixlBind.READ))

    stand_in: Any = types.ModuleType("nixl")
    stand_in.nixl_agent, stand_in.nixlBind = Agent, extension
    stand_in.nixl_agent_config = lambda **given: given
    Agent.__module__ = "nixl"
    monkeypatch.setitem(sys.modules, "nixl", stand_in)
    open_one()
    assert seen == [(side_effects._PERIOD_US, 7)]
    assert side_effects._PERIOD_US >= 5000
    assert stand_in.nixlBind is extension


def test_every_effect_has_a_variable_that_turns_it_off(monkeypatch, module):
    for variable, _ in side_effects.EFFECTS.values():
        monkeypatch.setenv(variable, "n")
    module.nixlBind = types.SimpleNamespace(nixlAgent=lambda _name, configuration: configuration)
    monkeypatch.setattr(StandIn, "__module__", "nixl")
    with side_effects.sleeping_progress_thread(StandIn):
        assert isinstance(module.nixlBind, types.SimpleNamespace)
    turns = side_effects.WorkerTurns(StandIn("a", None), "a", THREADS)
    turns.added_peer()
    assert turns._agent is None
    before = sys.getswitchinterval()
    side_effects.SwitchInterval(before / 10).lower()
    assert sys.getswitchinterval() == before
    side_effects.set_library_defaults()
    assert os.environ["UCX_RCACHE_MAX_UNRELEASED"] == os.environ["NIXL_LOG_LEVEL"] == "n"


def test_each_effect_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(side_effects, "_logged", set())
    monkeypatch.delenv("UCX_RCACHE_MAX_UNRELEASED", raising=False)
    with caplog.at_level("INFO", "kv_nixl_agent"):
        for _ in range(2):
            side_effects.set_library_defaults()
            monkeypatch.delenv("UCX_RCACHE_MAX_UNRELEASED")
    assert len(caplog.messages) == 1
    assert "UCX_RCACHE_MAX_UNRELEASED" in caplog.messages[0]


def test_agent_is_made_with_our_settings(module):
    _, agent = open_one(num_threads="4")
    assert agent.config == {
        "backends": [],
        "enable_prog_thread": False,
        "sync_mode": SyncMode.NIXL_THREAD_SYNC_RW,
    }
    assert agent.backends == {"UCX": {"num_threads": "4"}}


def test_missing_packages_are_named(monkeypatch):
    for name in nixl_binding.IMPORT_NAMES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AgentError, match=r"nixl_cu13.*nixl_rocm") as error:
        find_nixl()
    assert error.value.code == "nixl-missing"


def test_later_names_are_tried(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    monkeypatch.setitem(sys.modules, "nixl_cu12", module)
    assert find_nixl() is module


def test_backends_that_cannot_start(module):
    assert code_of(lambda: open_nixl("me", [("NOPE", {})])) == "backend-unavailable"
    assert code_of(lambda: open_nixl("me", [("UCX", {"num_wokers": "2"})])) == "backend-unavailable"
    assert code_of(lambda: open_nixl("me", [("UCX", {"num_workers": "bad"})])) == "backend-unavailable"


def test_returns_are_normalised(module):
    binding, agent = open_one()
    local, remote = handles(binding, 2)
    transfer = binding.make(local, ONE, remote, ONE, b"n")
    agent.calls.clear()
    agent.answers |= {
        "add_remote_agent": b"peer",
        "get_new_notifs": {"peer": [b"a", b"b"], "other": []},
        "check_xfer_state": "PROC",
        "transfer": "DONE",
    }
    assert binding.add_peer(b"blob") == "peer"
    assert list(binding.notifications()) == [("peer", b"a"), ("peer", b"b")]
    assert (binding.post(transfer), binding.check(transfer)) == ("done", "in-progress")
    assert binding.backend(transfer) == "UCX"
    assert "query_xfer_backend" not in [method for method, _ in agent.calls]
    agent.backends["GDS"] = {}
    for reported, known in (("GDS", "GDS"), (None, ""), (RuntimeError("no"), "")):
        agent.answers["query_xfer_backend"] = reported
        assert binding.backend(transfer) == known
    assert agent.calls[0] == ("add_remote_agent", (b"blob",))
    binding.make(local, ONE, remote, ONE, b"n")
    assert agent.calls[-1][1][0] == "READ"


def test_none_and_err_are_errors(module):
    binding, agent = open_one()
    (transfer,) = handles(binding, 1)
    assert code_of(lambda: binding.register("DRAM", ROWS[:, :3])) == "nixl-invalid-param"
    agent.answers = {"transfer": "ERR", "add_remote_agent": b""}
    assert code_of(lambda: binding.post(transfer)) == "nixl-backend"
    assert code_of(lambda: binding.add_peer(b"blob")) == "nixl-mismatch"


@pytest.mark.parametrize(
    ("raised", "code"), [(nixlRemoteDisconnectError("gone"), "nixl-disconnected"), (OSError("odd"), "nixl-unknown")]
)
def test_whatever_nixl_raises_is_coded(module, raised, code):
    binding, agent = open_one()
    (handle,) = handles(binding, 1)
    calls = {
        "check_xfer_state": lambda: binding.check(handle),
        "transfer": lambda: binding.post(handle),
        "prep_xfer_dlist": lambda: binding.prepare(None, "DRAM", ROWS),
        "get_new_notifs": binding.notifications,
    }
    for method, call in calls.items():
        agent.answers = {method: raised}
        with pytest.raises(AgentError) as error:
            call()
        assert error.value.code == code, method
        assert error.value.__cause__ is raised


def test_rows_are_expanded_for_a_nixl_without_strided_lists(module):
    binding, agent = open_one()

    def prepare(owner, rows, kind):
        if rows.shape[1] == 5:
            raise TypeError("incompatible function arguments")
        return "handle"

    agent.prep_xfer_dlist = prepare
    local = binding.prepare(None, "DRAM", ROWS)
    assert binding._strided is False
    remote = binding.prepare("p", "DRAM", ROWS)
    binding.make(local, ONE, remote, ONE, b"")
    assert agent.calls[-1] == ("make_prepped_xfer", ("READ", "handle", ONE, "handle", ONE, b""))


def test_closed_binding_refuses(module):
    binding, _ = open_one()
    binding.close()
    binding.close()
    assert code_of(binding.notifications) == "agent-closed"
    assert isinstance(binding, NixlBinding)


def test_the_agent_is_gone_when_it_is_closed_though_errors_of_its_calls_live_on(module):
    """UCX cleans up in the agent's destructor, which must run on the thread and at the moment of the closing."""

    binding, agent = open_one()
    (transfer,) = handles(binding, 1)
    agent.answers = dict.fromkeys(("transfer", "check_xfer_state", "prep_xfer_dlist"), nixlRemoteDisconnectError("x"))
    prepare = partial(binding.prepare, "p", "DRAM", ROWS)
    errors = []
    for call in (partial(binding.post, transfer), partial(binding.check, transfer), prepare, prepare):
        with pytest.raises(AgentError) as error:
            call()
        errors.append(error.value)
    watched = weakref.ref(agent)
    del agent
    binding.close()
    assert watched() is None


def test_handles_hold_nothing_of_the_agent_once_they_are_released_or_it_is_closed(module):
    """Each handle of NIXL's own holds its agent in C++, whoever keeps it."""
    binding, agent = open_one()
    prepared, left = handles(binding, 2)
    transfer = binding.make(prepared, ONE, left, ONE, b"")
    watched = [weakref.ref(handle.inner) for handle in (prepared, transfer, left)]
    binding.release(transfer)
    binding.release_prepared(prepared)
    agent.calls.clear()
    assert [watch() is None for watch in watched] == [True, True, False]
    assert code_of(lambda: binding.check(transfer)) == "nixl-invalid-param"
    binding.close()
    assert watched[2]() is None


THREADS = {"num_workers": "1", "num_threads": "2", "split_batch_size": "8"}


def open_with_threads(monkeypatch):
    monkeypatch.setattr(StandIn, "get_plugin_params", lambda *_: THREADS)
    binding = open_nixl("me", [("UCX", THREADS)])
    agent: Any = binding._agent
    agent.answers |= {"add_remote_agent": b"peer", "initialize_xfer": NixlHandle}
    agent.calls.clear()
    return binding, agent


def methods_of(agent):
    methods = [method for method, _ in agent.calls]
    agent.calls.clear()
    return methods


@pytest.mark.usefixtures("module")
def test_the_worker_threads_start_before_any_peer_and_take_a_turn_at_each_unless_they_take_one(monkeypatch):
    binding, agent = open_with_threads(monkeypatch)
    binding.notifications()
    pieces = [arguments[0] for method, arguments in agent.calls if method == "get_xfer_descs"]
    assert [len(rows) for rows in pieces] == [16, 16]  # two threads, parts of eight
    starts = np.concatenate(pieces)[:, 0]
    assert set(np.diff(starts).tolist()) == {16}, "pieces of 8 bytes, 8 bytes apart"
    first = ["register_memory", "get_xfer_descs", "get_xfer_descs", "initialize_xfer", "transfer"]
    assert methods_of(agent) == [*first, "get_new_notifs"]
    agent.answers["check_xfer_state"] = "PROC"
    assert binding.add_peer(b"blob") == "peer"
    assert methods_of(agent) == ["add_remote_agent", "check_xfer_state"]
    agent.answers["check_xfer_state"] = "DONE"
    binding.add_peer(b"blob")
    assert methods_of(agent) == ["add_remote_agent", "check_xfer_state", "transfer"]
    agent.answers["transfer"] = RuntimeError("no")
    binding.add_peer(b"blob")
    agent.calls.clear()
    assert binding.add_peer(b"blob") == "peer"
    assert methods_of(agent) == ["add_remote_agent"], "after a failure they are left alone"
    binding.close()


def test_the_threads_take_some_more_turns_after_a_new_peer(module, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(StandIn, "get_plugin_params", lambda *_: THREADS)
    agent: Any = StandIn("a", None)
    agent.answers |= {"initialize_xfer": NixlHandle, "check_xfer_state": "DONE"}
    turns = side_effects.WorkerTurns(agent, "a", THREADS, clock=lambda: now_s[0])

    def turns_until(end_s):
        found = []
        while now_s[0] < end_s:
            turns.take_due()
            if "transfer" in methods_of(agent):
                found.append(round(now_s[0] - 100, 2))
            now_s[0] += 0.01
        return found

    assert turns_until(101) == [0.0], "the one that starts the threads"
    now_s[0] = 100.0
    turns.added_peer()
    agent.calls.clear()
    found = turns_until(160)
    gaps = np.diff([0, *found])
    assert len(found) == 20
    assert gaps[:12].max() <= 0.061, "twelve at even gaps, whatever the clock's step"
    assert (np.diff(gaps[12:]) > 0).all(), "then rarer and rarer"
    assert 20 < found[-1] < 30
    turns.added_peer()
    agent.calls.clear()
    assert len(turns_until(220)) == 20, "and anew for the next peer"


@pytest.mark.usefixtures("module")
def test_a_close_waits_for_a_turn_that_is_under_way_and_no_longer_than_it_may(monkeypatch):
    binding, _ = open_with_threads(monkeypatch)
    binding.notifications()
    states = iter(["PROC", "PROC", "DONE"])
    monkeypatch.setattr(StandIn, "check_xfer_state", lambda *_: next(states), raising=False)
    binding.close()
    assert next(states, "asked thrice") == "asked thrice"
    hanging, _ = open_with_threads(monkeypatch)
    hanging.notifications()
    monkeypatch.setattr(side_effects, "_END_WAIT_S", 0.02)
    monkeypatch.setattr(StandIn, "check_xfer_state", lambda *_: "PROC", raising=False)
    hanging.close()


@pytest.mark.parametrize("spare", [0, 7])
def test_descriptors_left_are_those_that_can_be_opened(spare: int) -> None:
    words = [sys.executable, "-c", OPEN_MORE, str(spare)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "0"]


@pytest.mark.parametrize(("left", "is_refused"), [(0, True), (31, True), (32, False), (None, False)])
def test_no_peer_is_met_without_descriptors_for_it(
    module: Any, monkeypatch: pytest.MonkeyPatch, left: int | None, is_refused: bool
) -> None:
    """UCX would be left with half a connection, which can abort the peer."""
    agent: Any = StandIn("a", None)
    agent.answers["add_remote_agent"] = b"peer"
    monkeypatch.setattr(nixl_binding, "descriptors_left", lambda: left)
    binding = NixlBinding(agent, "stand-in")
    if not is_refused:
        assert binding.add_peer(b"metadata") == "peer"
        return
    with pytest.raises(AgentError, match=f"only {left} more descriptors") as error:
        binding.add_peer(b"metadata")
    assert (error.value.code, error.value.fault, error.value.is_retry_safe) == ("no-descriptors", "environment", True)
    assert not agent.calls, "NIXL was asked"
