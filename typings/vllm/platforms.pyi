class Platform:
    device_type: str
    @classmethod
    def get_nixl_supported_devices(cls) -> dict[str, tuple[str, ...]]: ...

current_platform: Platform
