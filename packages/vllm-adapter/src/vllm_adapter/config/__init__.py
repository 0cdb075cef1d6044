"""The connector's configuration: its keys, the fleet's secrets, and the checks at start."""

from vllm_adapter.config.keys import Settings, load_settings

__all__ = ["Settings", "load_settings"]
