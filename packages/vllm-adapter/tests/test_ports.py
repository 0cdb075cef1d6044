"""ports.py: values of the libraries are imported for type checkers alone, so importing it loads no library."""

from __future__ import annotations

import subprocess
import sys

LIBRARIES = ("kv_handshake", "kv_nixl_agent", "kv_scheduler_state", "kv_topology")


def test_importing_the_ports_loads_no_library() -> None:
    code = f"import sys, vllm_adapter.ports; sys.exit(sum(name in sys.modules for name in {LIBRARIES!r}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
