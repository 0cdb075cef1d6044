"""The life of a hand-over as state machines: tickets, leases, heartbeats, step plans."""

from kv_scheduler_state._announced import AnnouncedFences
from kv_scheduler_state._blocks import BlockList
from kv_scheduler_state._config import GroupConfig, SchedulerConfig, TicketLimits
from kv_scheduler_state._decisions import Admission, FinishDecision
from kv_scheduler_state._early_ticket import prefill_request_params
from kv_scheduler_state._errors import SchedulerStateError, TicketError
from kv_scheduler_state._lease import LeaseEnd, Refusal
from kv_scheduler_state._leases import LeaseTable
from kv_scheduler_state._plan import FenceOrder, GrantOrder, HeartbeatOrder, ReadOrder, StepPlan
from kv_scheduler_state._prompt import prompt_digest
from kv_scheduler_state._scheduler import SchedulerState
from kv_scheduler_state._ticket import HandoffTicket, PeerAddress
from kv_scheduler_state._ticket_reader import TicketReader

__version__ = "0.2.0"

__all__ = [
    # the scheduler process
    "SchedulerState",
    "SchedulerConfig",
    "GroupConfig",
    "TicketLimits",
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
    # a producer's worker
    "AnnouncedFences",
    "LeaseTable",
    "LeaseEnd",
    "Refusal",
    # the ticket
    "HandoffTicket",
    "TicketReader",
    "prefill_request_params",
    "prompt_digest",
    # errors
    "SchedulerStateError",
    "TicketError",
]
