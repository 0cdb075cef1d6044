"""The side-channel protocol that lets two inference engines agree to move a KV cache."""

from kv_handshake._advertisement import Advertisement, Mode, decode_advertisement, pairing_problems
from kv_handshake._client import Client
from kv_handshake._codec import Codec
from kv_handshake._compare import Comparison, Snapshot, compare
from kv_handshake._dialect import NEWEST_DIALECT, OLDEST_DIALECT, Dialect, dialect_of, dialect_of_vllm
from kv_handshake._errors import CODES, CodeFacts, ConfigurationError, Fault, HandshakeError, TransportError, WireError
from kv_handshake._explain import explain_hash, suspected_factors
from kv_handshake._factors import (
    FACTOR_GROUPS,
    Difference,
    Group,
    compatibility_hash,
    compatibility_id,
    differing_factors,
    hashed_factors,
)
from kv_handshake._keys import (
    ClientSecurity,
    ServerSecurity,
    read_authorized_keys,
    read_public_key,
    read_secret_key,
)
from kv_handshake._listener import Listener, QueryLimits
from kv_handshake._messages import AgentMetadata, Envelope, Refusal
from kv_handshake._notifications import Notification, encode_heartbeats, encode_read_complete, parse_notification
from kv_handshake._outcome import Outcome, Timing
from kv_handshake._policy import PROTOCOL_RANGE, Level, LocalOffer, Policy, Verdict, judge
from kv_handshake._probe import ProbeResult, probe, probe_advertisement
from kv_handshake._queries import ADVERTISEMENT_QUERY, Query, Rank, encode_query, parse_query
from kv_handshake._reading import decode_clock, decode_envelope, decode_metadata
from kv_handshake._recording import Recording, read_recording
from kv_handshake._server import ServerCore
from kv_handshake._session import ClientSession, SessionMemory
from kv_handshake._states import TRANSITIONS, Event, State, state_diagram
from kv_handshake._stream import StreamReader, encode_stream
from kv_handshake._vectors import Vector, load_vectors
from kv_handshake._zmq import generate_keypair

__version__ = "0.2.0"

__all__ = [
    # doing handshakes
    "Client",
    "Listener",
    "QueryLimits",
    "Outcome",
    "Timing",
    "Codec",
    # what an engine says of itself
    "LocalOffer",
    "Policy",
    "Level",
    "Verdict",
    "judge",
    "compatibility_hash",
    "compatibility_id",
    "hashed_factors",
    "differing_factors",
    "Difference",
    "Group",
    "FACTOR_GROUPS",
    "PROTOCOL_RANGE",
    "explain_hash",
    "suspected_factors",
    # what a router compares
    "Advertisement",
    "Mode",
    "decode_advertisement",
    "pairing_problems",
    # messages
    "Dialect",
    "dialect_of",
    "dialect_of_vllm",
    "OLDEST_DIALECT",
    "NEWEST_DIALECT",
    "Query",
    "Rank",
    "ADVERTISEMENT_QUERY",
    "encode_query",
    "parse_query",
    "Envelope",
    "AgentMetadata",
    "Refusal",
    "decode_envelope",
    "decode_metadata",
    "decode_clock",
    "Notification",
    "encode_read_complete",
    "encode_heartbeats",
    "parse_notification",
    # the protocol without input and output
    "ServerCore",
    "ClientSession",
    "SessionMemory",
    "State",
    "Event",
    "TRANSITIONS",
    "state_diagram",
    "StreamReader",
    "encode_stream",
    # looking at engines by hand
    "probe",
    "probe_advertisement",
    "ProbeResult",
    "Recording",
    "read_recording",
    "Snapshot",
    "compare",
    "Comparison",
    "Vector",
    "load_vectors",
    # encryption
    "ServerSecurity",
    "ClientSecurity",
    "generate_keypair",
    "read_public_key",
    "read_secret_key",
    "read_authorized_keys",
    # errors
    "HandshakeError",
    "WireError",
    "ConfigurationError",
    "TransportError",
    "CODES",
    "CodeFacts",
    "Fault",
    "__version__",
]
