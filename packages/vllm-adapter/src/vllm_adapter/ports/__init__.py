"""Protocols by which the adapter uses the four libraries.

The adapter is the consumer, so the Protocols live here; the libraries do not know them. `wiring.py` is the only module that
names concrete classes, and it holds one static conformance line per Protocol.

Values at these boundaries are builtins, bytes, sequences, mappings, `Literal` strings and numpy arrays of a stated dtype and
shape: no enum, no torch, no other package's exception. All members are read-only. Every exception that crosses a boundary
carries `code`, `fault`, `is_retry_safe` and `context`.
"""

from __future__ import annotations

from vllm_adapter.ports.agent import (
    PeerSpec,
    QuarantineEntry,
    ReadFigures,
    StallEntry,
    StreamListener,
    StreamWatch,
    StreamWords,
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
)
from vllm_adapter.ports.preflight import Comparison, Difference, PlanEstimate
from vllm_adapter.ports.requests import (
    Admission,
    FinishDecision,
    PromptIdentity,
    SchedulerState,
)
from vllm_adapter.ports.step_plan import StepPlan
from vllm_adapter.ports.stream_machines import StreamEndReport, StreamEnds, StreamWorker
from vllm_adapter.ports.stream_orders import (
    StreamChunk,
    StreamOpen,
    StreamPlan,
    StreamRun,
    StreamVoid,
)
from vllm_adapter.ports.stream_reads import StreamFacts, StreamOrder, StreamPart, StreamReaders, StreamReport
from vllm_adapter.ports.streams import (
    AskClient,
    AskListener,
    StreamAnswer,
    StreamCodec,
    StreamOutcome,
    StreamQuestion,
    StreamStanding,
    StreamState,
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
    RegionDocument,
    Reshard,
    StagedRegion,
)
from vllm_adapter.ports.values import BlockIds, Indices, MemoryKind, PageNumbers, Rows

__all__ = [
    "Admission",
    "AnnouncedFences",
    "AskClient",
    "AskListener",
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
    "ReadFigures",
    "ReadOrder",
    "Refusal",
    "RegionDocument",
    "Reshard",
    "Rows",
    "SchedulerState",
    "StagedRegion",
    "StallEntry",
    "StepPlan",
    "StreamAnswer",
    "StreamCodec",
    "StreamFacts",
    "StreamListener",
    "StreamOrder",
    "StreamPart",
    "StreamOutcome",
    "StreamQuestion",
    "StreamStanding",
    "StreamReaders",
    "StreamReport",
    "StreamState",
    "StreamWatch",
    "StreamWords",
    "StreamWorker",
    "StreamVoid",
    "StreamRun",
    "StreamPlan",
    "StreamOpen",
    "StreamEnds",
    "StreamEndReport",
    "StreamChunk",
    "ThreadHealth",
    "TransferResult",
    "TransferThread",
    "WireCodec",
]
