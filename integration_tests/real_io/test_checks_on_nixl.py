"""The checks of the port on real NIXL between two processes, over UCX's default transports, TCP alone and libfabric."""

from functools import partial

import pytest
from agent_checks.port_checks import CHECKS, FAULT_CHECKS, check_descending_pairs

from kv_nixl_agent.nixl.binding import NixlBinding, find_nixl


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", [*CHECKS, *FAULT_CHECKS], ids=lambda check: check.__name__)
def test_check(check, make_stage):
    check(make_stage())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["libfabric"], indirect=True)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_of_libfabric(check, make_stage):
    """Without dying peers: over TCP the plugin does not notice them, and does not close after them."""
    check(make_stage())


@pytest.mark.timeout(300)
def test_nixl_moves_pairs_that_descend_together_as_one_descriptor(make_stage, monkeypatch):
    """By NIXL's own count, which it keeps only if asked to."""
    nixl, name_of = find_nixl(), NixlBinding.backend
    monkeypatch.setattr(nixl, "nixl_agent_config", partial(nixl.nixl_agent_config, capture_telemetry=True))
    counts = []

    def backend(port, transfer):
        counts.append(port._agent.get_xfer_telemetry(transfer.inner).descCount)
        return name_of(port, transfer)

    monkeypatch.setattr(NixlBinding, "backend", backend)
    check_descending_pairs(make_stage())
    assert counts == [1]
