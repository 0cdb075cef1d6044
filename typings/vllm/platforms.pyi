class Platform:
    device_type: str
    def is_rocm(self) -> bool: ...
    @classmethod
    def get_nixl_supported_devices(cls) -> dict[str, tuple[str, ...]]: ...

current_platform: Platform
