"""The public names, pinned: a new one is added here on purpose."""

import importlib

import pytest

import kv_nixl_agent

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


def test_one_module_loads_nixl():
    """The import is dynamic, since the package has several names, so no import contract sees it."""
    from pathlib import Path

    sources = {path.name: path.read_text() for path in Path(kv_nixl_agent.__file__).parent.rglob("*.py")}
    assert [name for name, text in sources.items() if "import_module(" in text] == ["binding.py"]
    assert not [name for name, text in sources.items() if "import nixl" in text or "from nixl" in text]
