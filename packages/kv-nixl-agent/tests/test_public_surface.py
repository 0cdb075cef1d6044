"""The public names, pinned: a new one is added here on purpose."""

import importlib

import pytest

SURFACE = {
    "kv_nixl_agent": {
        "AgentError",
        "AgentOptions",
        "BackendOptions",
        "NixlPort",
        "PortFactory",
        "WireTelemetry",
        "open_nixl",
        "PeerSpec",
        "QuarantineEntry",
        "StallEntry",
        "ThreadHealth",
        "ThreadOptions",
        "TransferAgent",
        "TransferOrder",
        "TransferResult",
        "TransferThread",
    },
    "kv_nixl_agent.testing": {"FakeFabric", "FakeNixl", "FakeTransfer", "PeerProcess", "page_pattern", "stop_process"},
}


@pytest.mark.parametrize("module", SURFACE)
def test_names(module):
    loaded = importlib.import_module(module)
    assert set(loaded.__all__) == SURFACE[module]
    assert all(hasattr(loaded, name) for name in loaded.__all__)
