"""Parameters of NIXL's back ends reach them and change what they do; wrong ones are refused in a process of their own."""

from pathlib import Path

import pytest

from kv_nixl_agent import AgentError, AgentOptions, BackendOptions, open_nixl, try_backends

OURS = BackendOptions(engine_config={"TLS": "tcp"})
UCXS_OWN = BackendOptions(engine_config={"TLS": "tcp", "TCP_TX_SEG_SIZE": "8k"})
"""As an agent of another maker leaves it."""


def threads_of(parameters):
    """Return how many threads an agent with these parameters adds, and what NIXL says of its back end."""
    before = len(list(Path("/proc/self/task").iterdir()))
    port = open_nixl("parameters", [("UCX", parameters)], progress_thread=False)
    try:
        return len(list(Path("/proc/self/task").iterdir())) - before, port._agent.get_backend_params("UCX")
    finally:
        port.close()


def test_threads_of_ucx_are_as_many_as_its_parameter_says():
    found = {number: threads_of({"num_threads": number}) for number in ("0", "2", "5")}
    assert {number: reported["num_threads"] for number, (_, reported) in found.items()} == {
        each: each for each in found
    }
    assert found["5"][0] - found["0"][0] == 5
    assert found["2"][0] - found["0"][0] == 2


@pytest.mark.parametrize(
    ("parameters", "starts"),
    [
        ({"engine_config": "TLS=tcp"}, True),
        ({"engine_config": "TLS=tcp,TCP_TX_SEG_SIZE=128k"}, False),  # longer than what is received at once
        ({"engine_config": "TLS=no_such_transport"}, False),
        ({"ucx_error_handling_mode": "peer"}, True),
        ({"ucx_error_handling_mode": "no_such_mode"}, False),
    ],
    ids=str,
)
def test_a_value_that_ucx_cannot_obey_stops_the_back_end(parameters, starts):
    if starts:
        assert threads_of(parameters)[1] == parameters
        return
    with pytest.raises(AgentError, match="did not start") as caught:
        threads_of(parameters)
    assert caught.value.code == "backend-unavailable"


@pytest.mark.parametrize(
    ("backends", "words"),
    [
        ([("NOPE", {})], "no plugin 'NOPE'"),
        ([("UCX", {"num_wokers": "2"})], "no parameters ['num_wokers']"),
        ([("UCX", {"num_workers": "2"}), ("UCX_MO", {})], "no plugin 'UCX_MO'"),
        ([("UCX", {"ucx_devices": "\ud800"})], "did not start"),  # a message of several lines
    ],
)
def test_what_does_not_start_is_found_in_another_process(backends, words, monkeypatch):
    monkeypatch.setenv("NIXL_LOG_LEVEL", "TRACE")  # lines before and after the reason
    try_backends([("UCX", {"num_workers": "2"})])
    with pytest.raises(AgentError) as caught:
        try_backends(backends)
    assert caught.value.code == "backend-unavailable"
    assert words in str(caught.value)


@pytest.mark.parametrize("transport", [OURS, UCXS_OWN], ids=["reads from ours", "ours reads"])
def test_agents_that_send_other_sizes_at_once_over_tcp_read_each_others_pages(make_stage, transport):
    assert dict(OURS.as_parameters())["engine_config"] == "TLS=tcp,TCP_TX_SEG_SIZE=64k"
    reader = UCXS_OWN if transport is OURS else OURS
    stage = make_stage(page_bytes=2**18, options=AgentOptions(backends=(reader,)))
    stage.producer.fill(seed=7)
    stage.connect()
    pages = list(range(64))
    assert stage.read("all", pages, pages[::-1]).outcome == "done"
    stage.expect_pages(7, pages, pages[::-1])
