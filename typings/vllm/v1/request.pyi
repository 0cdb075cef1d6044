import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm.lora.request import LoRARequest
from vllm.v1.structured_output.request import StructuredOutputRequest

class RequestStatus(enum.IntEnum):
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = ...
    FINISHED_STOPPED = ...
    FINISHED_LENGTH_CAPPED = ...
    FINISHED_ABORTED = ...
    FINISHED_IGNORED = ...
    FINISHED_ERROR = ...
    FINISHED_REPETITION = ...

class _PlaceholderRange:
    offset: int
    length: int

class _MediaItem:
    data: Mapping[str, Any] | None
    identifier: str
    mm_position: _PlaceholderRange

class Request:
    request_id: str
    status: RequestStatus
    kv_transfer_params: Any
    trace_headers: Mapping[str, str] | None
    prompt_token_ids: list[int] | None
    prompt_embeds: torch.Tensor | None
    prompt_is_token_ids: list[bool] | None
    _all_token_ids: list[int]
    arrival_time: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: list[bytes]
    max_tokens: int
    mm_features: Sequence[_MediaItem]
    lora_request: LoRARequest | None
    cache_salt: str | None
    structured_output_request: StructuredOutputRequest | None
    all_token_ids: Sequence[int]
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    def get_skip_reading_prefix_cache(self) -> bool: ...
