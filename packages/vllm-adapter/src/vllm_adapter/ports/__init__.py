"""Protocols by which the adapter uses the four libraries.

The adapter is the consumer, so the Protocols of services live here; the libraries do not know them. `wiring.py` is the only
module that names concrete classes, and it holds one static conformance line per Protocol. Values of kv-scheduler-state are its
own classes, named here for types alone.

Values at these boundaries are builtins, bytes, sequences, mappings, `Literal` strings and numpy arrays of a stated dtype and
shape: no enum, no torch, no other package's exception. All members are read-only. Every exception that crosses a boundary
carries `code`, `fault`, `is_retry_safe` and `context`.
"""

# ruff: noqa: TC004 -- `__all__` lists names of values, which exist for type checkers alone

from __future__ import annotations

from typing import TYPE_CHECKING

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
from vllm_adapter.ports.leases import AnnouncedFences, LeaseTable
from vllm_adapter.ports.preflight import Comparison, Difference, PlanEstimate
from vllm_adapter.ports.requests import (
    PromptIdentity,
    SchedulerState,
)
from vllm_adapter.ports.stream_machines import StreamEnds, StreamWorker
from vllm_adapter.ports.stream_reads import StreamReaders
from vllm_adapter.ports.streams import (
    AskClient,
    AskListener,
    StreamCodec,
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
    RankShape,
    RegionDocument,
    Reshard,
    StagedRegion,
)
from vllm_adapter.ports.values import BlockIds, Indices, MemoryKind, PageNumbers, Rows

if TYPE_CHECKING:
    from kv_scheduler_state import (
        Admission,
        BlockList,
        FenceOrder,
        FinishDecision,
        GrantOrder,
        HeartbeatOrder,
        LeaseEnd,
        PeerAddress,
        ReadOrder,
        Refusal,
        StepPlan,
    )
    from kv_scheduler_state.streams import (
        StreamAnswer,
        StreamChunk,
        StreamOpen,
        StreamOrder,
        StreamOutcome,
        StreamPart,
        StreamPlan,
        StreamQuestion,
        StreamReport,
        StreamRun,
        StreamStanding,
        StreamVoid,
    )

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
    "StreamAnswer",
    "StreamCodec",
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
    "StreamChunk",
    "ThreadHealth",
    "TransferResult",
    "TransferThread",
    "WireCodec",
]
