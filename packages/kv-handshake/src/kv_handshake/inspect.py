"""Looking at engines by hand: probes, recordings and comparisons."""

from kv_handshake._tools.probe import probe
from kv_handshake._tools.recording import Comparison, Recording, Snapshot, compare
from kv_handshake._wire.factors import Difference

__all__ = [
    "Comparison",
    "Difference",
    "Recording",
    "Snapshot",
    "compare",
    "probe",
]
