"""Every log call of the packages is limited per cause, or stands here with the reason why nobody can repeat it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from kvdev.paths import PACKAGES, ROOT

_LEVELS = frozenset(
    ("debug", "info", "info_once", "warning", "warning_once", "warn", "error", "exception", "critical", "log", "handle")
)
_LOGGER = re.compile(r"(^|[._])logger$|^logging$")
_LIMITED = re.compile(r"(^|[._])(log|recorder)$")

LIMITERS = {
    "kv_handshake/core/pacing.py GatedLog.warning": "one line per topic and ten seconds",
    "vllm_adapter/observe/recorder.py Recorder._log": "ten lines per cause and ten seconds",
}
ONCE = {
    "kv_nixl_agent/nixl/side_effects.py _log_once": "once per process and effect",
    "vllm_adapter/config/secrets.py FleetSecrets.changed": "files of this host, looked at once a second; a trouble once",
    "vllm_adapter/host/connector.py KVTransferConnector.__init__": "once per start",
    "vllm_adapter/host/early_checks.py _check": "once per configuration that an application makes",
    "vllm_adapter/host/factors.py _weights": "once per start",
    "vllm_adapter/host/metrics.py PromMetrics._guarded": "once per metric",
    "vllm_adapter/host/ray_serve.py KVTransferBackend._tell_of_sequence": "once per replica",
    "vllm_adapter/host/shutdown.py warn_of_short_drain": "once per start",
    "vllm_adapter/host/vllm.py check_host": "once per start",
    "vllm_adapter/host/vllm.py has_content_ids": "once per start",
    "vllm_adapter/host/weights.py LoraAdapters._files": "once per adapter that an operator has loaded",
    "vllm_adapter/host/weights.py LoraAdapters.identity": "once per change of an adapter's files",
    "vllm_adapter/observe/answers.py StatusSocket.open": "once per start",
    "vllm_adapter/scheduler/holdings.py Holdings.end": "once per end of an engine",
    "vllm_adapter/scheduler/holdings.py Holdings.drain": "once per end of an engine",
    "vllm_adapter/scheduler/holdings.py Holdings.revoke": "once per command of an operator",
    "vllm_adapter/scheduler/registration.py ServedRegistration._log_served": "once per start and wake-up, which the host orders",
    "vllm_adapter/scheduler/streams.py Streaming.admitted": "once in an engine's life",
    "vllm_adapter/scheduler/streams.py Streaming.check_whole": "once per reason, four in all",
    "vllm_adapter/scheduler/side.py SchedulerSide._note_unsealed": "once per peer, 256 in all",
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


def _walk(node: ast.AST, place: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield (class and method or function, call), in order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield place, child
        inner = place
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and place.count(".") < 2:
            inner = f"{place}.{child.name}"
        yield from _walk(child, inner)


@cache
def calls() -> list[tuple[str, str, str, str, bool]]:
    """Return (file and place, owner, method, first argument, whether that is a constant) of each method call of the packages."""
    found = []
    for package in PACKAGES:
        source = ROOT / "packages" / package / "src"
        for file in sorted(source.rglob("*.py")):
            for place, call in _walk(ast.parse(file.read_text()), ""):
                if isinstance(call.func, ast.Attribute):
                    first = call.args[0] if call.args else None
                    where = f"{file.relative_to(source)} {place.lstrip('.').removesuffix('.call')}"
                    owner, is_constant = ast.unparse(call.func.value), isinstance(first, ast.Constant)
                    found.append((where, owner, call.func.attr, ast.unparse(first) if first else "", is_constant))
    return found


def test_a_log_call_is_limited_or_cannot_be_repeated_from_outside() -> None:
    found = {where for where, owner, method, *_ in calls() if method in _LEVELS and _LOGGER.search(owner)}
    assert found == LIMITERS.keys() | ONCE.keys()


def test_a_cause_and_an_action_are_constants_or_codes() -> None:
    varying = [call for call in calls() if not call[4]]
    causes = {first for _, owner, method, first, _ in varying if method in _LEVELS and _LIMITED.search(owner)}
    assert causes <= CAUSES
    assert {first for _, _, method, first, _ in varying if method in {"trouble", "guarded"}} == ACTIONS


def test_loggers_are_called_so_that_the_other_tests_find_them() -> None:
    sources = [file for package in PACKAGES for file in (ROOT / "packages" / package / "src").rglob("*.py")]
    named = [
        (file.name, name)
        for file in sources
        for name in re.findall(
            r"^ *([\w.]+)[^=\n]* = (?:logging\.getLogger|init_logger)\(", file.read_text(), re.MULTILINE
        )
    ]
    assert len(named) > 5
    assert [each for each in named if not _LOGGER.search(each[1])] == []
