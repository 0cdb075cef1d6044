"""Makes `fleets` importable by the tests beside it, and leaves all but the main job to `dev.py test --full`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "fakes"))

MAIN_JOB = (
    # Two engines of ours behind the router.
    "test_dense.py::test_the_log_of_a_start",
    "test_dense.py::test_concurrent_hand_overs",
    "test_dense.py::test_a_prompt_shorter_than_a_block",
    "test_dense.py::test_chat_and_streaming",
    "test_dense.py::test_status_tells",
    # Ours and vLLM's own connector, both ways; ranks of unequal tensor-parallel sizes.
    "test_mixed_fleet.py::test_a_family_crosses_in_every_pairing[dense-auto]",
    "test_mixed_fleet.py::test_unequal_tensor_parallel_sizes[ours]",
    # Refusals, and an engine that is killed.
    "test_failures.py::test_the_corrupted_page_control",
    "test_failures.py::test_a_prompt_whose_picture",
    "test_failures.py::test_a_ticket_of_another_prompt",
    "test_failures.py::test_a_producer_that_dies",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.nodeid.partition("engines/")[2].startswith(MAIN_JOB):
            item.add_marker(pytest.mark.full)
