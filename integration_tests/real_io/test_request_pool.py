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
    ("lines", "switch", "state"),
    [
        ([OURS, TELL], "y", "zeroed"),
        ([OURS, THEIRS, TELL], "y", "zeroed"),
        ([THEIRS, OURS, TELL], "y", "already-in-use"),
        ([OURS, TELL], "n", "off"),
    ],
)
def test_the_pool_is_zeroed_where_ucx_is_new_to_the_process(lines: list[str], switch: str, state: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "KV_NIXL_ZEROED_REQUESTS": switch},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[-1:]) == (0, [state]), done.stderr[-2000:]


def test_the_pool_is_left_alone_where_the_environment_does_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([OURS, TELL])],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "32768"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split()[-1:] == ["zeroed"], done.stderr[-2000:]
    assert "zeroed-requests" not in done.stdout
