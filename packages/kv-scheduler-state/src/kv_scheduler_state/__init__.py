"""The life of a hand-over as state machines: tickets, leases, heartbeats, step plans."""

from kv_scheduler_state.config import GroupConfig, SchedulerConfig
from kv_scheduler_state.errors import SchedulerStateError, TicketError
from kv_scheduler_state.plan import FenceOrder, GrantOrder, HeartbeatOrder, ReadOrder, StepPlan
from kv_scheduler_state.scheduler.state import SchedulerState
from kv_scheduler_state.scheduler.streaming import Streams
from kv_scheduler_state.ticket.early import prefill_request_params
from kv_scheduler_state.ticket.prompt import UNBOUND, PromptIdentity, TextPrompt, prompt_digest
from kv_scheduler_state.ticket.reader import TicketReader
from kv_scheduler_state.ticket.ticket import HandoffTicket, PeerAddress
from kv_scheduler_state.values import Admission, BlockList, FinishDecision
from kv_scheduler_state.worker.leases import LeaseEnd, LeaseTable, Refusal
from kv_scheduler_state.worker.state import EndReport, WorkerState

__version__ = "0.3.0"

__all__ = [
    # the scheduler process
    "SchedulerState",
    "Streams",
    "SchedulerConfig",
    "GroupConfig",
    "Admission",
    "FinishDecision",
    # the step plan
    "StepPlan",
    "ReadOrder",
    "HeartbeatOrder",
    "FenceOrder",
    "GrantOrder",
    "BlockList",
    "PeerAddress",
    # a worker
    "WorkerState",
    "EndReport",
    "LeaseTable",
    "LeaseEnd",
    "Refusal",
    # the ticket
    "HandoffTicket",
    "TicketReader",
    "PromptIdentity",
    "TextPrompt",
    "UNBOUND",
    "prefill_request_params",
    "prompt_digest",
    # errors
    "SchedulerStateError",
    "TicketError",
]
