"""Start, watch and end real vLLM engines on this machine's loopback."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvdev.envs import host_environment
from kvdev.paths import ROOT, STATE
from kvdev.steps import CRASH_SIGNS, fail, note, run_step

if TYPE_CHECKING:
    from kvdev.forked import ForkedProcess

_HEALTHY_WITHIN_S = 600.0
_ENDS_WITHIN_S = 15.0
_PR_SET_PDEATHSIG = 1
_SITE = Path(__file__).parent / "engine_site"
"""First on an engine's path: its `sitecustomize.py` lets processes that wait for one another sleep."""
_PORTS = range(10_000, 32_768)
_ports_given: set[int] = set()
_NAMES_AN_ERROR = re.compile(
    "|".join([r"\b\w*(Error|Exception)\b: ", "UCX +(FATAL|ERROR)", *map(re.escape, CRASH_SIGNS)])
)
_NOT_INHERITED = ("VLLM_", "UCX_", "NIXL_", "KVDEV_", "KV_TRANSFER_", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Arguments that an engine is started with."""

    name: str
    model: Path
    cpus: str
    """Cores of its OpenMP threads: `0`, or `0|1` for two tensor-parallel ranks."""
    kv_transfer: Mapping[str, object] | None = None
    """`--kv-transfer-config`, None for an engine without a connector."""
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


EngineProcess: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"
"""The server's process, which leads a group of its own."""
Launch: TypeAlias = "Callable[[Sequence[str], Mapping[str, str], Path], EngineProcess]"


class Engine:
    """A vLLM API server in a process group of its own, on free ports or those of an engine that it replaces.

    Args:
        spec: Arguments that it is started with.
        python: The host environment's.
        instead_of: An engine that has ended, whose ports it takes and whose log it goes on with.
        launch: Starts the process from (command, environment, log); None for a new Python.
    """

    def __init__(
        self, spec: EngineSpec, python: Path, *, instead_of: Engine | None = None, launch: Launch | None = None
    ) -> None:
        self.spec = spec
        self._python = python
        self._launch = launch or _new_python
        self.port: int = instead_of.port if instead_of else free_port()
        self.side_channel_port: int = instead_of.side_channel_port if instead_of else free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # vLLM leaves its sockets behind where it is killed.
        self._sockets = tempfile.mkdtemp(prefix="kv-engine-")
        weakref.finalize(self, shutil.rmtree, self._sockets, ignore_errors=True)
        folder = STATE / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"engine-{spec.name}.log"
        if instead_of is None:
            self.log.write_bytes(b"")
        self._process = self._launch(self._command(python), self._environment(), self.log)

    def _command(self, python: Path) -> list[str]:
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.spec.model), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", "268435456", "--dtype", "float32",
            "--generation-config", "vllm",
        ]  # fmt: skip
        if self.spec.kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(dict(self.spec.kv_transfer))]
        return [*command, *self.spec.arguments]

    def _environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        own_path = self.spec.environment.get("PYTHONPATH", inherited.get("PYTHONPATH", ""))
        return {
            **inherited,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": self._sockets,
            "VLLM_CPU_OMP_THREADS_BIND": self.spec.cpus,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            **self.spec.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_SITE), own_path, os.environ.get("KVDEV_HOST_SITE", "")])),
        }

    @property
    def pid(self) -> int:
        """The server's process; it leads the engine's process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the server process still lives."""
        return self._process.poll() is None

    def is_healthy(self) -> bool:
        """Whether the engine answers its health check."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def complete(self, body: Mapping[str, object]) -> dict[str, object]:
        """Post one completion request and return the JSON answer."""
        data, headers = json.dumps(dict(body)).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return dict(json.load(answer))

    def metrics(self) -> str:
        """Return the engine's Prometheus page."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def last_words(self, lines: int = 12) -> str:
        """Return the last lines of its log and the first errors that it names: the cause is far from the end."""
        text = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in text if _NAMES_AN_ERROR.search(line) and " WARNING " not in line]
        return "\n    ".join(["  its last lines:", *text[-lines:], "the first errors that it names:", *errors[:8]])

    def again(self) -> Engine:
        """Start the same engine anew on the same ports, after its end; its log goes on."""
        return Engine(self.spec, self._python, instead_of=self, launch=self._launch)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the server's process alone, as a supervisor does: vLLM then drains."""
        self._process.terminate()

    def has_ended(self, within_s: float) -> bool:
        """Wait for the end of the server's process; whether it came."""
        try:
            self._process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal_all(self, number: int) -> None:
        """Send a signal to the engine's whole process group, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait_ended(self) -> None:
        """Wait for an engine that was told to end; what it leaves, or all of it after a while, is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_ENDS_WITHIN_S)
        self.signal_all(signal.SIGKILL)
        self._process.wait(timeout=10)


def _new_python(command: Sequence[str], environment: Mapping[str, str], log: Path) -> EngineProcess:
    with log.open("ab") as sink:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (one system call, no lock, no import)
        )


@contextlib.contextmanager
def start_all(
    specs: Sequence[EngineSpec], python: Path, *, quiet: bool = False, launch: Launch | None = None
) -> Iterator[list[Engine]]:
    """Start engines together, wait until all are healthy, and end them whatever happens."""
    engines: list[Engine] = []
    try:
        for spec in specs:
            engines.append(Engine(spec, python, launch=launch))  # noqa: PERF401  (those already started are stopped if one cannot be)
        wait_healthy(engines, quiet=quiet)
        yield engines
    finally:
        for engine in engines:
            engine.signal_all(signal.SIGTERM)
        for engine in engines:
            engine.wait_ended()


def wait_healthy(engines: Sequence[Engine], *, quiet: bool = True) -> None:
    """Wait until engines that were started together are healthy; fail when one ends or the time is up."""
    started = time.monotonic()
    for waited in engines:
        while not waited.is_healthy():
            elapsed_s = time.monotonic() - started
            for engine in engines:
                if not engine.is_running or elapsed_s > _HEALTHY_WITHIN_S:
                    how = f"is not healthy after {elapsed_s:.0f} s" if engine.is_running else "ended while starting"
                    fail(f"engine '{engine.spec.name}' {how}\n  log: {engine.log}\n{engine.last_words()}")
            time.sleep(0.3)
        if not quiet:
            note(f"  ok  engine '{waited.spec.name}' is healthy ({time.monotonic() - started:.0f} s)")


def free_port() -> int:
    """Return a loopback port that is free, never the same twice.

    A server binds its port half a minute after it was told the number. So it lies below those that Linux gives to
    whoever asks for any: a starting engine and its UCX take about twenty of these.
    """
    while True:
        port = random.randrange(_PORTS.start, _PORTS.stop)  # noqa: S311
        with contextlib.suppress(OSError), socket.socket() as probe:
            if port not in _ports_given:
                probe.bind(("127.0.0.1", port))
                _ports_given.add(port)
                return port


def local_model(uv: Path, family: str, vllm: str) -> tuple[Path, Path]:
    """Return (host python, model directory), making the model on the first call.

    The host is the one that `KVDEV_HOST_PYTHON` names (the GPU stage's), else the environment of vLLM on CPU.
    """
    named = os.environ.get("KVDEV_HOST_PYTHON")
    python = Path(named) if named else host_environment(uv, vllm)
    folder = STATE / "models" / family
    if not (folder / "made.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            env = {**os.environ, "HF_HUB_OFFLINE": "1"}
            run_step(f"make model {family}", [python, ROOT / "tools/kvdev/make_model.py", family, folder], env=env)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return python, folder


def metric_sum(page: str, name: str, **labels: str) -> float:
    """Add up the samples of one metric on a Prometheus page; 0 when it has none."""
    return math.fsum(sample.value for sample in samples_of(page, name) if labels.items() <= sample.labels.items())


def samples_of(page: str, *names: str) -> list[Sample]:
    """Return the samples of these names on a Prometheus page; without names, all of them."""
    return [sample for family in families_of(page) for sample in family.samples if not names or sample.name in names]


def families_of(page: str) -> list[Metric]:
    """Return the metrics on a Prometheus page with their types and samples, those without a sample too."""
    return list(text_string_to_metric_families(page))


def die_with_parent() -> None:
    """Make the kernel end this process when dev.py dies without cleaning up (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
