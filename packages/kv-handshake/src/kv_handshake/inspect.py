"""Looking at engines by hand: probes, recordings and comparisons."""

from kv_handshake.tools.probe import probe
from kv_handshake.tools.recording import Comparison, Recording, compare
from kv_handshake.wire.factors import Difference

__all__ = [
    "Comparison",
    "Difference",
    "Recording",
    "compare",
    "probe",
]
