"""Test doubles and checks.

A fake NIXL that moves bytes and fails on demand, a port that counts handles, a producer in a process of its own,
and the checks that every implementation of the port must pass.
"""

from kv_nixl_agent._producer_process import PeerProcess, page_pattern, stop_process
from kv_nixl_agent.testing._checks import CHECKS, FAULT_CHECKS
from kv_nixl_agent.testing._fake import FakeFabric
from kv_nixl_agent.testing._recording import RecordingPort, recording_factory
from kv_nixl_agent.testing._stage import ProducerControl, Stage

__all__ = [
    "CHECKS",
    "FAULT_CHECKS",
    "FakeFabric",
    "PeerProcess",
    "ProducerControl",
    "RecordingPort",
    "Stage",
    "page_pattern",
    "recording_factory",
    "stop_process",
]
