from collections.abc import Mapping

from opentelemetry.context import Context

class TraceContextTextMapPropagator:
    def extract(self, carrier: Mapping[str, str]) -> Context: ...
