from typing import Any

class StructuredOutputRequest:
    def __init__(self, params: Any, _grammar: Exception | None = None) -> None: ...
