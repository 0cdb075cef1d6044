"""The part of Ray Serve LLM 2.60 that the adapter uses."""

from typing import Self

class Request:
    request_id: object
    max_tokens: int | None
    stream: bool | None
    kv_transfer_params: dict[str, object] | None
    def model_copy(self, *, deep: bool = ...) -> Self: ...

def clamp_request_to_single_token(request: Request) -> None: ...
