import enum
from collections.abc import Mapping
from typing import Any

import torch

class RequestStatus(enum.IntEnum):
    FINISHED_STOPPED = ...
    FINISHED_LENGTH_CAPPED = ...
    FINISHED_ABORTED = ...
    FINISHED_IGNORED = ...
    FINISHED_ERROR = ...

class Request:
    request_id: str
    status: RequestStatus
    kv_transfer_params: Any
    trace_headers: Mapping[str, str] | None
    prompt_token_ids: list[int] | None
    prompt_embeds: torch.Tensor | None
    _all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    max_tokens: int
