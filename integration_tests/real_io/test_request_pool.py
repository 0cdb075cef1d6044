"""UCX's request pool in the NIXL that is installed: changed where this package loads UCX first, left alone otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OURS = "from kv_nixl_agent import open_nixl; port = open_nixl('ours', [('UCX', {})])"
THEIRS = (
    "from kv_nixl_agent.nixl.binding import find_nixl; n = find_nixl(); "
    "other = n.nixl_agent('theirs', n.nixl_agent_config(backends=[])); other.create_backend('UCX', {})"
)
TELL = "from kv_nixl_agent.nixl.side_effects import POOL, _logged; print(sorted(_logged)); print(POOL.state)"


@pytest.mark.parametrize(
    ("lines", "variables", "state"),
    [
        ([OURS], {}, "zeroed"),
        ([OURS, THEIRS], {}, "zeroed"),
        ([THEIRS, OURS], {}, "already-in-use"),
        ([OURS], {"KV_NIXL_ZEROED_REQUESTS": "n"}, "off"),
        ([OURS], {"MALLOC_MMAP_THRESHOLD_": "32768"}, "zeroed"),
    ],
)
def test_the_pool_is_zeroed_where_ucx_is_new_to_the_process(
    lines: list[str], variables: dict[str, str], state: str
) -> None:
    """It is left alone where the environment does the same."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, TELL])],
        env={**os.environ, "KV_NIXL_ZEROED_REQUESTS": "y", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[-1:]) == (0, [state]), done.stderr[-2000:]
    if "MALLOC_MMAP_THRESHOLD_" in variables:
        assert "zeroed-requests" not in done.stdout
