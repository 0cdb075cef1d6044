from ray.llm._internal.serve.engines.vllm.kv_transfer.base import Request

class CompletionRequest(Request):
    def __init__(self, **values: object) -> None: ...

class ChatCompletionRequest(Request):
    def __init__(self, **values: object) -> None: ...
