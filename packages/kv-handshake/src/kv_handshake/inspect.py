"""Looking at engines by hand: probes, recordings and comparisons."""

from kv_handshake._compare import Snapshot, compare
from kv_handshake._probe import probe
from kv_handshake._recording import Recording

__all__ = [
    "Recording",
    "Snapshot",
    "compare",
    "probe",
]
