from typing import TypeVar

T = TypeVar("T")

def create_metric_per_engine(metric: T, per_engine_labelvalues: dict[int, list[object]]) -> dict[int, T]: ...
