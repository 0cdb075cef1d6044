import enum
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

CopyBlocksOp = Callable[
    [dict[str, torch.Tensor], dict[str, torch.Tensor], list[int], list[int], Literal["h2d", "d2h"]], None
]

@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)

class SupportsHMA: ...

class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1

class KVConnectorHandshakeMetadata(ABC): ...
class KVConnectorMetadata(ABC): ...

class KVConnectorWorkerMetadata(ABC):
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata: ...


class KVConnectorBase_V1:
    _cache_hit_source: Any
    _connector_metadata: KVConnectorMetadata | None
    _kv_cache_config: KVCacheConfig
    _vllm_config: VllmConfig
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None: ...
