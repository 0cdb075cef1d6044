"""Every log call of the packages is limited per cause, or stands here with the reason why nobody can repeat it."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING

from kvdev.paths import PACKAGES, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEVELS = frozenset(
    ("debug", "info", "info_once", "warning", "warning_once", "warn", "error", "exception", "critical", "log")
)
_LOGGER = re.compile(r"(^|[._])logger$|^logging$")
_LIMITED = re.compile(r"(^|[._])(log|recorder)$")
_FACTORIES = frozenset({"logging.getLogger", "init_logger"})

LIMITERS = {
    "kv_handshake/core/pacing.py GatedLog.warning": "one line per topic and ten seconds",
    "vllm_adapter/observe/cause_log.py CauseLog._log": "ten lines per cause and ten seconds",
}
ONCE = {
    "kv_nixl_agent/nixl/side_effects.py _log_once": "once per process and effect",
    "vllm_adapter/config/secrets.py FleetSecrets.changed": "files of this host, looked at once a second; a trouble once",
    "vllm_adapter/host/connector.py KVTransferConnector.__init__": "once per start",
    "vllm_adapter/host/factors.py _weights": "once per start",
    "vllm_adapter/host/metrics.py PromMetrics._guarded": "once per metric",
    "vllm_adapter/host/ray_serve.py KVTransferBackend._tell_of_sequence": "once per replica",
    "vllm_adapter/config/start_checks.py check_start": "once per start",
    "vllm_adapter/host/shutdown.py warn_of_short_drain": "once per start",
    "vllm_adapter/host/vllm.py check_host": "once per start",
    "vllm_adapter/host/vllm.py has_content_ids": "once per start",
    "vllm_adapter/host/weights.py LoraAdapters._files": "once per adapter that an operator has loaded",
    "vllm_adapter/host/weights.py LoraAdapters.identity": "once per change of an adapter's files",
    "vllm_adapter/observe/recorder.py Recorder.trouble": "once per action and kind of error, 100 in all",
    "vllm_adapter/observe/status_socket.py StatusSocket.open": "once per start",
    "vllm_adapter/scheduler/holdings.py Holdings.end": "once per end of an engine",
    "vllm_adapter/scheduler/holdings.py Holdings.drain": "once per end of an engine",
    "vllm_adapter/scheduler/holdings.py Holdings.revoke": "once per command of an operator",
    "vllm_adapter/scheduler/registration.py ServedRegistration._renew": "once per wake-up from sleep, which the host orders",
    "vllm_adapter/scheduler/registration.py ServedRegistration.serve": "once per start",
    "vllm_adapter/scheduler/streams.py Streaming.admitted": "once in an engine's life",
    "vllm_adapter/scheduler/streams.py Streaming.check_whole": "once per reason, four in all",
    "vllm_adapter/scheduler/outcomes.py OutcomeLog.unsealed": "once per peer, 256 in all",
    "vllm_adapter/worker/engine_thread.py WorkerSide.unregister": "once per sleep, which the host orders",
    "vllm_adapter/worker/registration.py Registration._wait_for_quiet": "once per sleep or end of an engine",
}
CAUSES = {
    "cause",
    "code",
    "self.event",
    "end.code",
    "' '.join(codes)",
    "code_of(error)",
    "f'producer-{code}'",
    "f'stream-{outcome.code}'",
}
"""Causes that are no constants: names that are codes, or constants of the caller."""
ACTIONS = {"action", "f'completion of a read ({step})'"}
"""Actions of `Recorder.trouble` that are no constants: each text is remembered, so none may hold a request or a peer."""


def calls(node: ast.AST, place: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Yield (class and method or function, call), in order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield place, child
        inner = place
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and place.count(".") < 1:
            inner = f"{place}.{child.name}".lstrip(".")
        yield from calls(child, inner)


@cache
def of_packages() -> list[tuple[str, ast.Module]]:
    sources = [ROOT / "packages" / package / "src" for package in PACKAGES]
    files = [(source, file) for source in sources for file in sorted(source.rglob("*.py"))]
    return [(str(file.relative_to(source)), ast.parse(file.read_text())) for source, file in files]


def direct_calls(tree: ast.Module) -> set[str]:
    """Return where a logger is called without a limiter."""
    return {
        place.removesuffix(".call")
        for place, call in calls(tree)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in _LEVELS
        and _LOGGER.search(ast.unparse(call.func.value))
    }


def causes_of(tree: ast.Module) -> set[str]:
    """Return the causes of limited lines that are no constants."""
    return {
        ast.unparse(call.args[0])
        for _, call in calls(tree)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in _LEVELS
        and _LIMITED.search(ast.unparse(call.func.value))
        and not isinstance(call.args[0], ast.Constant)
    }


def test_a_log_call_is_limited_or_can_be_repeated_by_nobody() -> None:
    found = {f"{file} {place}" for file, tree in of_packages() for place in direct_calls(tree)}
    assert found == LIMITERS.keys() | ONCE.keys()


def test_a_cause_is_a_constant_or_a_code() -> None:
    assert {cause for _, tree in of_packages() for cause in causes_of(tree)} <= CAUSES


def test_an_action_that_fails_has_a_constant_name() -> None:
    found = {
        ast.unparse(call.args[0])
        for _, tree in of_packages()
        for _, call in calls(tree)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in {"trouble", "guarded"}
        and not isinstance(call.args[0], ast.Constant)
    }
    assert found == ACTIONS


def test_loggers_are_called_so_that_the_other_tests_find_them() -> None:
    for file, tree in of_packages():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            if ast.unparse(node.value.func) in _FACTORIES:
                assert all(_LOGGER.search(ast.unparse(target)) for target in node.targets), (file, node.lineno)
