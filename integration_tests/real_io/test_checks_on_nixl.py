"""The checks of the port on real NIXL between two processes, over the default transports and over TCP alone."""

import pytest
from agent_checks.port_checks import CHECKS, FAULT_CHECKS


@pytest.mark.timeout(60)
@pytest.mark.parametrize("check", [*CHECKS, *FAULT_CHECKS], ids=lambda check: check.__name__)
def test_check(check, make_stage):
    check(make_stage())
