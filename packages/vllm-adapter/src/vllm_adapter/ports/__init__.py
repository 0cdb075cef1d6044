"""Protocols by which the adapter uses the four libraries.

The adapter is the consumer, so the Protocols live here; no library knows that they exist. `wiring.py` is the only module
that names concrete classes, and it holds one static conformance line per Protocol.

At these boundaries there are builtins, bytes, sequences, mappings, `Literal` strings and numpy arrays of a stated dtype
and shape: no enum, no torch, no other package's exception. All members are read-only. Every exception that crosses one
carries `code`, `fault`, `is_retry_safe` and `context`.
"""

from __future__ import annotations

from vllm_adapter.ports.agent import (
    PeerSpec,
    QuarantineEntry,
    StallEntry,
    ThreadHealth,
    TransferResult,
    TransferThread,
)
from vllm_adapter.ports.handshake import (
    HandshakeClient,
    HandshakeListener,
    HandshakeOutcome,
    NotificationView,
    PeerMetadata,
    WireCodec,
)
from vllm_adapter.ports.leases import AnnouncedFences, LeaseEnd, LeaseTable, Refusal
from vllm_adapter.ports.orders import (
    BlockList,
    FenceOrder,
    GrantOrder,
    HeartbeatOrder,
    PeerAddress,
    ReadOrder,
    StepPlan,
)
from vllm_adapter.ports.preflight import Comparison, Difference, PlanEstimate
from vllm_adapter.ports.requests import (
    Admission,
    FinishDecision,
    PromptIdentity,
    SchedulerState,
)
from vllm_adapter.ports.topology import (
    AxisEntry,
    FieldDocument,
    GeometryDocument,
    GroupDocument,
    HeadOrder,
    MemberEntry,
    PageMove,
    PeerPlan,
    PeerSizes,
    Planner,
    RankShape,
    RegionDocument,
    Reshard,
    StagedRegion,
)
from vllm_adapter.ports.values import BlockIds, Indices, MemoryKind, PageNumbers, Rows

__all__ = [
    "Admission",
    "AnnouncedFences",
    "AxisEntry",
    "BlockIds",
    "BlockList",
    "Comparison",
    "Difference",
    "FenceOrder",
    "FieldDocument",
    "FinishDecision",
    "GeometryDocument",
    "GrantOrder",
    "GroupDocument",
    "HandshakeClient",
    "HandshakeListener",
    "HandshakeOutcome",
    "HeadOrder",
    "HeartbeatOrder",
    "Indices",
    "LeaseEnd",
    "LeaseTable",
    "MemberEntry",
    "MemoryKind",
    "NotificationView",
    "PageMove",
    "PageNumbers",
    "PeerAddress",
    "PeerMetadata",
    "PeerPlan",
    "PeerSizes",
    "PeerSpec",
    "PlanEstimate",
    "Planner",
    "PromptIdentity",
    "QuarantineEntry",
    "RankShape",
    "ReadOrder",
    "Refusal",
    "RegionDocument",
    "Reshard",
    "Rows",
    "SchedulerState",
    "StagedRegion",
    "StallEntry",
    "StepPlan",
    "ThreadHealth",
    "TransferResult",
    "TransferThread",
    "WireCodec",
]
