from typing import Any, ClassVar

class KVConnectorFactory:
    _registry: ClassVar[dict[str, Any]]
    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None: ...
