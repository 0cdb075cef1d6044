"""Looking at engines by hand: probes, recordings and comparisons."""

from kv_handshake._tools.probe import probe
from kv_handshake._tools.recording import Recording, Snapshot, compare

__all__ = [
    "Recording",
    "Snapshot",
    "compare",
    "probe",
]
