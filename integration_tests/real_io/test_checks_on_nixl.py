"""The checks of the port on real NIXL between two processes, over UCX's default transports, TCP alone and libfabric."""

import pytest
from agent_checks.port_checks import CHECKS, FAULT_CHECKS


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
