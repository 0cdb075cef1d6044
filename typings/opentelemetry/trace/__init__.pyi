import enum
from collections.abc import Mapping

from opentelemetry.context import Context

class StatusCode(enum.Enum):
    OK = ...
    ERROR = ...

class Span:
    def set_status(self, status: StatusCode, description: str | None = None) -> None: ...
    def end(self, end_time: int | None = None) -> None: ...

class Tracer:
    def start_span(
        self,
        name: str,
        context: Context | None = None,
        *,
        attributes: Mapping[str, str | int] | None = None,
        start_time: int | None = None,
    ) -> Span: ...

def get_tracer(instrumenting_module_name: str) -> Tracer: ...
def set_span_in_context(span: Span, context: Context | None = None) -> Context: ...
