from typing import Any, ClassVar

from vllm.config import KVTransferConfig

class KVConnectorFactory:
    _registry: ClassVar[dict[str, Any]]
    @classmethod
    def get_connector_class(cls, kv_transfer_config: KVTransferConfig) -> type[object]: ...
    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None: ...
