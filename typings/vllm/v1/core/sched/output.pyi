class SchedulerOutput:
    preempted_req_ids: set[str] | None
