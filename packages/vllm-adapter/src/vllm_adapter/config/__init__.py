"""The connector's configuration: its keys, the fleet's secrets, and the checks at start."""

from vllm_adapter.config.keys import (
    OBSOLETE_KEYS,
    RENEWED_PART,
    Settings,
    check_whole,
    describe_keys,
    describe_schema,
    load_keys,
    load_settings,
)

__all__ = [
    "OBSOLETE_KEYS",
    "RENEWED_PART",
    "Settings",
    "check_whole",
    "describe_keys",
    "describe_schema",
    "load_keys",
    "load_settings",
]
