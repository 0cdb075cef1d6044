"""What the adapter needs from each of the four libraries.

The adapter is the consumer, so the Protocols live here; no library knows that they exist. `wiring.py` is the only module
that names concrete classes, and it holds one static conformance line per Protocol.

At these boundaries there are builtins, bytes, sequences, mappings, `Literal` strings and numpy arrays of a stated dtype
and shape: no enum, no torch, no other package's exception. All members are read-only. Every exception that crosses one
carries `code`, `fault`, `is_retry_safe` and `context`.
"""

from __future__ import annotations

from vllm_adapter.ports.agent import TransferResult as TransferResult
from vllm_adapter.ports.agent import TransferThread as TransferThread
from vllm_adapter.ports.handshake import (
    HandshakeClient as HandshakeClient,
)
from vllm_adapter.ports.handshake import (
    HandshakeListener as HandshakeListener,
)
from vllm_adapter.ports.handshake import (
    HandshakeOutcome as HandshakeOutcome,
)
from vllm_adapter.ports.handshake import (
    NotificationView as NotificationView,
)
from vllm_adapter.ports.handshake import (
    PeerMetadata as PeerMetadata,
)
from vllm_adapter.ports.handshake import (
    WireCodec as WireCodec,
)
from vllm_adapter.ports.requests import (
    Admission as Admission,
)
from vllm_adapter.ports.requests import (
    FenceOrder as FenceOrder,
)
from vllm_adapter.ports.requests import (
    FinishDecision as FinishDecision,
)
from vllm_adapter.ports.requests import (
    GrantOrder as GrantOrder,
)
from vllm_adapter.ports.requests import (
    HeartbeatOrder as HeartbeatOrder,
)
from vllm_adapter.ports.requests import (
    LeaseEnd as LeaseEnd,
)
from vllm_adapter.ports.requests import (
    LeaseTable as LeaseTable,
)
from vllm_adapter.ports.requests import (
    ReadOrder as ReadOrder,
)
from vllm_adapter.ports.requests import (
    SchedulerState as SchedulerState,
)
from vllm_adapter.ports.requests import (
    StepPlan as StepPlan,
)
from vllm_adapter.ports.topology import DeriveDocument as DeriveDocument
from vllm_adapter.ports.topology import PeerPlan as PeerPlan
from vllm_adapter.ports.topology import PeerSizes as PeerSizes
from vllm_adapter.ports.topology import Planner as Planner
from vllm_adapter.ports.values import BlockIds as BlockIds
from vllm_adapter.ports.values import Indices as Indices
from vllm_adapter.ports.values import MemoryKind as MemoryKind
from vllm_adapter.ports.values import Rows as Rows

__all__ = [
    "Admission",
    "BlockIds",
    "DeriveDocument",
    "FenceOrder",
    "FinishDecision",
    "GrantOrder",
    "HandshakeClient",
    "HandshakeListener",
    "HandshakeOutcome",
    "HeartbeatOrder",
    "Indices",
    "LeaseEnd",
    "LeaseTable",
    "MemoryKind",
    "NotificationView",
    "PeerMetadata",
    "PeerPlan",
    "PeerSizes",
    "Planner",
    "ReadOrder",
    "Rows",
    "SchedulerState",
    "StepPlan",
    "TransferResult",
    "TransferThread",
    "WireCodec",
]
