"""The life of a hand-off as state machines: tickets, leases, heartbeats, step plans."""

from kv_scheduler_state._blocks import BlockClipper, Blocks
from kv_scheduler_state._clock import ObservedClock
from kv_scheduler_state._config import MAX_GENERATION, GroupConfig, SchedulerConfig, TicketLimits
from kv_scheduler_state._decisions import Admission, FinishDecision, FinishReason, Role
from kv_scheduler_state._errors import (
    DuplicateRequest,
    IllegalTransition,
    InvalidConfig,
    InvalidEvent,
    PlanDecodeError,
    SchedulerStateError,
    TicketError,
    UnknownRequest,
)
from kv_scheduler_state._fences import ended_generation
from kv_scheduler_state._hosts import HostPolicy
from kv_scheduler_state._lease import LeaseEnd, LeaseEndReason, ReaderVerdict
from kv_scheduler_state._leases import LeaseTable
from kv_scheduler_state._machine import Table, Transition
from kv_scheduler_state._peer import PeerAddress
from kv_scheduler_state._plan import EMPTY_PLAN, FenceOrder, GrantOrder, HeartbeatOrder, ReadOrder, StepPlan
from kv_scheduler_state._plan_codec import PLAN_VERSION
from kv_scheduler_state._scheduler import SchedulerState
from kv_scheduler_state._tables import CONSUMER_TABLE, LEASE_TABLE, PRODUCER_TABLE
from kv_scheduler_state._ticket import HandoffTicket, TicketKind, prefill_request_params
from kv_scheduler_state._ticket_reader import ParamsKind, TicketReader

__version__ = "0.2.0"

__all__ = [
    # the scheduler process
    "SchedulerState",
    "SchedulerConfig",
    "GroupConfig",
    "TicketLimits",
    "Admission",
    "Role",
    "FinishDecision",
    "FinishReason",
    # the step plan
    "StepPlan",
    "ReadOrder",
    "HeartbeatOrder",
    "FenceOrder",
    "GrantOrder",
    "Blocks",
    "EMPTY_PLAN",
    "PLAN_VERSION",
    # a producer's worker
    "LeaseTable",
    "LeaseEnd",
    "LeaseEndReason",
    "ReaderVerdict",
    "ended_generation",
    "MAX_GENERATION",
    # the ticket
    "HandoffTicket",
    "PeerAddress",
    "TicketReader",
    "TicketKind",
    "ParamsKind",
    "HostPolicy",
    "prefill_request_params",
    # parts of their own use
    "BlockClipper",
    "ObservedClock",
    "Table",
    "Transition",
    "PRODUCER_TABLE",
    "CONSUMER_TABLE",
    "LEASE_TABLE",
    # errors
    "SchedulerStateError",
    "IllegalTransition",
    "UnknownRequest",
    "DuplicateRequest",
    "InvalidEvent",
    "InvalidConfig",
    "TicketError",
    "PlanDecodeError",
    "__version__",
]
