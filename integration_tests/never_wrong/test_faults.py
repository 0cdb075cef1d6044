"""The oracle finds every planted fault within a stated number of cases, and nothing in the same cases without a fault."""

from __future__ import annotations

import pytest
from oracle.faults import FAULTS, Fault, planted
from oracle.runner import try_seed

PACKAGES = {"kv_handshake", "kv_nixl_agent", "kv_scheduler_state", "kv_topology", "vllm_adapter"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title.replace(" ", "-"))
def test_a_planted_fault_is_found(fault: Fault) -> None:
    with planted(fault):
        found = next((seed for seed in range(fault.within) if try_seed(seed)[1]), None)
    assert found is not None, f"{fault.title}: not found within {fault.within} cases"
    assert not try_seed(found)[1], "the case goes wrong without the fault, too"


def test_every_package_on_the_path_has_faults() -> None:
    assert {fault.package for fault in FAULTS} == PACKAGES
