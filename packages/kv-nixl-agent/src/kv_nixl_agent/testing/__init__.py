"""Test doubles: a fake NIXL that moves bytes and fails on demand, and a producer in a process of its own."""

from kv_nixl_agent._producer_process import PeerProcess, page_pattern, stop_process
from kv_nixl_agent.testing._fake import FakeFabric

__all__ = ["FakeFabric", "PeerProcess", "page_pattern", "stop_process"]
