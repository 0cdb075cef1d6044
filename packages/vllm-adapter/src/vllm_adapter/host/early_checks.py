"""Start checks before the weights load, so that a misspelt key stops the engine in seconds.

vLLM creates a connector after it has loaded the weights, and reliably calls none before. But the first process of each engine
makes its whole configuration by `EngineArgs.create_engine_config`, after it has loaded plugins. So that method is extended here
and called as before. What cannot be checked there, or in another process, is checked when the connector starts.
"""

from __future__ import annotations

import copy
import functools
import logging
import multiprocessing
import os
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from vllm_adapter.errors import AdapterError, ConfigurationError, code_of, message_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig

__all__ = ["SWITCH", "check_new_configurations"]

SWITCH = "KV_TRANSFER_EARLY_CHECKS"
"""Environment variable that turns these checks off: 0."""
_OWN_MODULE = "vllm_adapter.host.connector"
_logger = logging.getLogger("vllm.vllm_adapter")
_has_passed = threading.Event()
"""Set by the first good configuration: from then on the side channel's port may be taken by an engine of this process."""


def check_new_configurations() -> None:
    """Let vLLM refuse the configuration of an engine with this connector as soon as it is made; idempotent."""
    arguments: Any = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    create: Any = getattr(arguments, "create_engine_config", None)
    if create is not None and not hasattr(create, "checks_kv_transfer"):

        @functools.wraps(create)
        def checked(*args: object, **keys: object) -> VllmConfig:
            config: VllmConfig = create(*args, **keys)
            _check(config)
            return config

        vars(checked)["checks_kv_transfer"] = True
        arguments.create_engine_config = checked


def _check(config: VllmConfig) -> None:
    """Raise the first refusal of a start, with the others as notes.

    Raises:
        ConfigurationError: with the refusal's own code.
    """
    if os.environ.get(SWITCH) == "0" or multiprocessing.parent_process() is not None:
        return
    try:
        own = list(_own_configurations(config))
        outer_role = str(config.kv_transfer_config and config.kv_transfer_config.kv_role)
        refusals = [error for each in own for error in _refusals(each, outer_role)]
    except Exception:
        _logger.debug("kv-transfer: no check before the weights load", exc_info=True)
        return
    if refusals:
        error = ConfigurationError(f"kv-transfer: {message_of(refusals[0])}", code=code_of(refusals[0]))
        for other in refusals[1:]:
            error.add_note(f"kv-transfer: {other}")
        raise error
    if own:
        _has_passed.set()


def _own_configurations(config: VllmConfig) -> Iterator[VllmConfig]:
    """Yield the configuration as this connector gets it: by itself, or as a child of vLLM's MultiConnector."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    transfer, parallel = config.kv_transfer_config, config.parallel_config
    # Under Ray, or without a rank here, the engine starts on another host, perhaps with other files and variables.
    is_ray = parallel.ray_runtime_env is not None or parallel.data_parallel_backend == "ray"
    if transfer is None or transfer.kv_connector is None or is_ray or not parallel.data_parallel_size_local:
        return
    transfers = [transfer]
    if transfer.kv_connector == "MultiConnector":
        children = cast("list[dict[str, Any]]", (transfer.kv_connector_extra_config or {})["connectors"])
        transfers = [KVTransferConfig(**child, engine_id=transfer.engine_id) for child in children]
    for each in transfers:
        if any(base.__module__ == _OWN_MODULE for base in KVConnectorFactory.get_connector_class(each).__mro__):
            own = copy.copy(config)
            own.kv_transfer_config = each
            yield own


def _refusals(config: VllmConfig, outer_role: str) -> tuple[Exception, ...]:
    """Return what a start with this configuration refuses; the role is that of a MultiConnector around it, or its own."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_adapter.config.keys import load_settings
    from vllm_adapter.host.vllm import engine_facts, extra_config
    from vllm_adapter.wiring import start_refusals

    no_cache = KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[])
    parallel = config.parallel_config
    try:
        settings, _ = load_settings(extra_config(config))
        facts = engine_facts(config, no_cache, is_worker=False, settings=settings)
    except AdapterError as error:
        return (error,)
    if outer_role != facts.kv_role:
        facts = replace(facts, outer_role=outer_role)
    # Data-parallel ranks listen on ports of their own, perhaps on other hosts.
    binds = parallel.node_rank == 0 and parallel.data_parallel_size == 1 and not _has_passed.is_set()
    return start_refusals(settings, facts, is_worker=parallel.node_rank > 0, binds=binds)
