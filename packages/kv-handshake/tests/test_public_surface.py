"""The public names: a change here is a change for every user of the package."""

import importlib
import subprocess
import sys

import pytest

SURFACE = {
    "kv_handshake": "AgentMetadata Client Codec ConfigurationError HandshakeError Listener LocalOffer Notification Outcome "
    "QueryLimits Timing TransportError WireError dialect_of_vllm",
    "kv_handshake.security": "ClientSecurity ServerSecurity generate_keypair",
    "kv_handshake.inspect": "Comparison Difference Recording compare probe",
    "kv_handshake.testing": "load_vectors sample_envelopes sample_metadata",
}


@pytest.mark.parametrize("name", SURFACE)
def test_public_names(name):
    module = importlib.import_module(name)
    assert " ".join(module.__all__) == SURFACE[name]
    assert all(hasattr(module, each) for each in module.__all__)


def test_an_engine_loads_no_tools():
    program = "import sys, kv_handshake.security\nprint(*{'kv_handshake.cli', 'kv_handshake.inspect'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\n"
