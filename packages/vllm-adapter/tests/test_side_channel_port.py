"""The side channel's port: one rule for what an engine listens on, its ticket names, and Ray's replica publishes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from factories import facts, write_secret

from kv_scheduler_state import UNBOUND
from vllm_adapter.config import load_settings
from vllm_adapter.config.start_checks import PORT_VARIABLE, listening_port
from vllm_adapter.errors import ConfigurationError, UnsupportedHost
from vllm_adapter.scheduler.followed import Arrival, Ending
from vllm_adapter.wiring import make_scheduler

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
OF_KUBERNETES = "tcp://10.96.0.7:5600"
NO_NUMBERS = [OF_KUBERNETES, "udp://10.96.0.7:5600", "", " ", "http", "5600/tcp", "0x15e0", "5600.0", "-", "1" * 5000]


@pytest.fixture(autouse=True)
def _without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORT_VARIABLE, raising=False)
    monkeypatch.setenv(HOST_VARIABLE, "10.0.0.1")


def refusal(run: Callable[[], object]) -> UnsupportedHost:
    with pytest.raises(UnsupportedHost) as caught:
        run()
    return caught.value


def test_the_refusal_names_the_variable_and_what_is_right_and_kubernetes_where_it_is_its_doing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in NO_NUMBERS:
        monkeypatch.setenv(PORT_VARIABLE, value)
        error = refusal(lambda: listening_port(lambda: int(os.environ[PORT_VARIABLE]), 0))
        assert str(error).startswith(
            f"{PORT_VARIABLE} is {value[:80]!r}, which is not a number: it must be a port, 1 to 65535"
        )
        assert ("Service named vllm-nixl-side-channel" in str(error)) is ("://" in value)
        assert len(str(error)) < 500


@pytest.mark.parametrize(
    "value",
    [
        "prefill:",
        "prefill:65536",
        "http://prefill",
        "a b",
        "-x",
        "[::1]",
        "::1:x",
        "[a]:1:2",
        "10.0.0.1:65536",
        "[::1]:0",
    ],
)
def test_an_advertised_host_that_no_reader_accepts_is_refused_at_start(value: str) -> None:
    with pytest.raises(ConfigurationError, match="advertised_host"):
        load_settings({"advertised_host": value})


def test_an_advertised_address_is_in_the_ticket_and_under_its_seal_while_the_listener_binds_another(
    tmp_path: Path,
) -> None:
    settings = load_settings({"ticket_secrets": [write_secret(tmp_path / "secret", b"a" * 16)]})[0]
    engine = replace(facts(engine_id="P"), host="203.0.113.7", port=31000, listens_on=("127.0.0.1", 0))
    writer, reader = (make_scheduler(each, settings) for each in (engine, facts(engine_id="D")))
    writer.arrived(Arrival("p", {"do_remote_decode": True}, 32, identity=UNBOUND))
    writer.allocated("p", [[1, 2]], [[1, 2]], external_tokens=0, preemptions=0)
    _, ticket = writer.finished(Ending("p", "length", 32, identity=UNBOUND), [[1, 2]])
    assert ticket is not None
    assert (ticket["remote_host"], ticket["remote_port"]) == ("203.0.113.7", 31000)
    reader.arrived(Arrival("d", ticket, 32, identity=UNBOUND))
    reader.arrived(Arrival("moved", {**ticket, "remote_host": "127.0.0.1"}, 32, identity=UNBOUND))
    assert [reader.external_tokens(name, 0)[0] for name in ("d", "moved")] == [32, 0]
    writer.serve({})
    try:
        assert writer._served._listener.port not in {0, 31000}
    finally:
        writer.close()


# ---------------------------------------------------------------------------------------------------------- Ray's replica


class RaysBackend:
    """The part of Ray's back end that gives a replica its port. Source: `nixl.py` and `base.py` of Ray 2.60."""

    first_port = 20_000

    def __init__(self, llm_config: Any) -> None:
        self.llm_config = llm_config

    @property
    def kv_transfer_config(self) -> Any:
        return self.llm_config.engine_kwargs["kv_transfer_config"]

    def setup(self) -> None:
        if PORT_VARIABLE not in os.environ:
            offset = self.llm_config.engine_kwargs.get("data_parallel_rank", 0)
            os.environ[PORT_VARIABLE] = str(self.first_port + offset)
        self.engine_port = int(os.environ[PORT_VARIABLE])


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Make the connector's back end for a replica, over a stand-in of Ray's."""
    root = "ray.llm._internal.serve.engines.vllm.kv_transfer"
    names = [".".join(root.split(".")[:count]) for count in range(1, 7)]
    for name in (*names, f"{root}.base", f"{root}.factory", f"{root}.nixl"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setattr(sys.modules[f"{root}.nixl"], "NixlConnectorBackend", RaysBackend)
    monkeypatch.delitem(sys.modules, "vllm_adapter.host.ray_serve", raising=False)
    kind = importlib.import_module("vllm_adapter.host.ray_serve").KVTransferBackend
    monkeypatch.setenv(PORT_VARIABLE, "")  # so that the variable that Ray sets is taken back
    monkeypatch.delenv(PORT_VARIABLE)

    def make(rank: object = None) -> Any:
        extra = {"streaming": True, "remote_hosts": ["10.0.0.0/8"]}
        kwargs = {"kv_transfer_config": {"kv_connector_extra_config": extra}}
        return kind(SimpleNamespace(engine_kwargs=kwargs if rank is None else {**kwargs, "data_parallel_rank": rank}))

    yield make
    sys.modules.pop("vllm_adapter.host.ray_serve", None)


@pytest.mark.parametrize("own", [None, "5600"], ids=["port of Ray", "port of the environment"])
@pytest.mark.parametrize("rank", [None, 0, 1, 2, 15])
def test_a_replica_publishes_the_port_on_which_its_engine_listens(
    backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, rank: int | None, own: str | None
) -> None:
    if own is not None:
        monkeypatch.setenv(PORT_VARIABLE, own)
    replica = backend(rank)
    replica.setup()
    listened = listening_port(lambda: int(os.environ[PORT_VARIABLE]), rank or 0)
    assert replica.replica_metadata() == {"kv_side_channel": ["10.0.0.1", listened]}
    assert listened == (int(own) + (rank or 0) if own else RaysBackend.first_port + 2 * (rank or 0))


@pytest.mark.parametrize("rank", [-1, "2", None, 1.0])
def test_a_rank_that_is_none_counts_as_little_as_for_ray(backend: Callable[..., Any], rank: object) -> None:
    os.environ[PORT_VARIABLE] = "5600"
    assert backend(rank).replica_metadata() == {"kv_side_channel": ["10.0.0.1", 5600]}


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_replica_refuses_a_port_that_is_no_number_before_ray_reads_it(
    backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(PORT_VARIABLE, value)
    for run in (backend().setup, backend().replica_metadata):
        assert refusal(run).code == "side-channel-port"
