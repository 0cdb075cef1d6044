"""Looking at engines by hand: probes, recordings, comparisons, and explanations of bare hashes."""

from kv_handshake._compare import Comparison, Snapshot, compare
from kv_handshake._explain import explain_hash
from kv_handshake._factors import Difference
from kv_handshake._probe import probe, probe_advertisement
from kv_handshake._recording import Recording

__all__ = [
    "Comparison",
    "Difference",
    "Recording",
    "Snapshot",
    "compare",
    "explain_hash",
    "probe",
    "probe_advertisement",
]
