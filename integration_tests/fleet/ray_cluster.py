"""A private Ray cluster on loopback that serves the app file of `docs/operate/ray.md`.

Ray, Serve and vLLM make many processes in many groups. All inherit one mark in their environment, and whatever carries it when
the test ends, well or not, is killed by its number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from judging import ask_all, fleet_python, model_folder

from kvdev.engines import die_with_parent, free_port
from kvdev.paths import ROOT, STATE

PAGE = ROOT / "docs" / "operate" / "ray.md"
NODE_IP = "127.0.0.1"
_MARK = "FLEET_MARK"
_NOT_INHERITED = ("VLLM_", "UCX_", "NIXL_", "KVDEV_", "KV_TRANSFER_", "RAY_", "PYTHONDONTWRITEBYTECODE")
_ENGINE = {
    "max_model_len": 2048, "kv_cache_memory_bytes": 2**28, "dtype": "float32", "enforce_eager": True,
    "max_num_batched_tokens": 128, "max_num_seqs": 8,
}  # fmt: skip
"""Long prompts are computed in many steps."""
_STARTS_WITHIN_S = 600.0
_ENDS_WITHIN_S = 20.0


@dataclass
class RayCluster:
    """A running app: its address, its metrics, and its processes."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    ports: dict[str, int] = field(default_factory=dict)
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def port(self, name: str) -> int:
        """Return the port of this name, a free one on the first call."""
        return self.ports.setdefault(name, free_port())

    @property
    def url(self) -> str:
        """Address of the app's ingress."""
        return f"http://127.0.0.1:{self.port('http')}"

    # ------------------------------------------------------------------------------------------------------ processes

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start the documented command that begins with `name`, with further words behind it."""
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(_NOT_INHERITED)},
            "PATH": f"{fleet_python().parent}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Without clusters of several machines Ray keeps to loopback; else it takes an address that others can reach.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_ADDRESS": f"{NODE_IP}:{self.port('port')}",
            "MODEL": str(model_folder()),
            _MARK: self.mark,
        }
        with (self.folder / f"{name.replace(' ', '-')}.log").open("wb") as sink:
            process = subprocess.Popen(
                ["bash", "-c", f'exec {_command(name)} "$@"', name, *words],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  (one system call, no lock, no import)
            )
        self.started[name] = process
        return process

    def serve(self, *words: str) -> None:
        """Start the app with these arguments beside the documented ones, or change what runs, and wait until it is ready.

        Replicas whose arguments stay go on.
        """
        before = self.started.get("serve run")
        if before is not None:
            before.kill()  # an interrupt would end the app
            before.wait()
        first = [f"{side}_first_port={self.port(side)}" for side in ("prefill", "decode")]
        process = self.start("serve run", *first, f"engine={json.dumps(_ENGINE)}", *words)
        until = time.monotonic() + _STARTS_WITHIN_S
        while "Application 'default' is ready" not in (self.folder / "serve-run.log").read_text(errors="replace"):
            assert process.poll() is None, self.last_words()
            assert time.monotonic() < until, self.last_words()
            time.sleep(0.5)

    def processes(self, text: str = "") -> list[int]:
        """Return the process numbers of this cluster whose command line contains `text`."""
        own = os.getpid()
        found = [
            int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) != own
        ]
        return [number for number in found if self._is_ours(number) and text in _read(number, "cmdline")]

    def _is_ours(self, number: int) -> bool:
        return f"{_MARK}={self.mark}" in _read(number, "environ").split("\0")

    def kill(self, numbers: list[int]) -> None:
        """Kill processes of this cluster by their numbers."""
        for number in numbers:
            if self._is_ours(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

    def end(self) -> None:
        """Kill all processes but resource trackers, which clean up and end by themselves: Serve would take half a minute."""
        self.kill([number for number in self.processes() if "resource_tracker" not in _read(number, "cmdline")])
        until = time.monotonic() + _ENDS_WITHIN_S
        while self.processes() and time.monotonic() < until:
            time.sleep(0.2)
        self.kill(self.processes())
        for process in self.started.values():
            process.wait(timeout=10)

    # -------------------------------------------------------------------------------------------------------- looking

    def page(self) -> str:
        """Return the metrics page of Ray's agent, with names as vLLM's own server would show them."""
        return _as_vllm(_get(f"http://{NODE_IP}:{self.port('metrics-export-port')}/metrics"))

    def wait_serving(self) -> None:
        """Wait until a request is answered; fail with the logs when a command ended or the time is up."""
        until = time.monotonic() + _STARTS_WITHIN_S
        while True:
            (reply,) = ask_all(self.url, [0], timeout_s=20)
            if reply.status == 200:
                return
            ended = [name for name in ("ray start", "serve run") if self.started[name].poll() is not None]
            assert not ended, f"{ended} ended\n{self.last_words()}"
            assert time.monotonic() < until, f"{reply} after {_STARTS_WITHIN_S:.0f} s\n{self.last_words()}"
            time.sleep(0.5)

    def logs(self) -> str:
        """Return what all replicas and their engines have written."""
        files = self.folder.glob("session_latest/logs/worker-*.[oe][ur][tr]")
        return "".join(file.read_text(errors="replace") for file in files)

    def last_words(self) -> str:
        """Return the last lines of each log of the commands, of Serve and of the engines."""
        logs = [*self.folder.glob("*.log"), *self.folder.glob("session_latest/logs/serve/*.log")]
        logs += self.folder.glob("session_latest/logs/worker-*.[oe][ur][tr]")
        tails = {log.name: log.read_text(errors="replace").splitlines()[-8:] for log in logs}
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in tails.items() if lines)


@contextlib.contextmanager
def started_cluster(name: str) -> Iterator[RayCluster]:
    """Start a cluster with one node; its logs are kept under this name."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder))
        try:
            _start(cluster)
            yield cluster
        finally:
            cluster.end()
            _keep_logs(cluster, STATE / "logs" / f"ray-{name}")


def _start(cluster: RayCluster) -> None:
    (program,) = _fenced("python")
    (cluster.folder / "pd_app.py").write_text(program)
    names = [
        "port", "metrics-export-port", "node-manager-port", "object-manager-port", "ray-client-server-port",
        "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port",
    ]  # fmt: skip
    options = [word for name in names for word in (f"--{name}", str(cluster.port(name)))]
    # Workers take ports of the system's choice; by default Ray would claim all from 10002 to 19999.
    options += ["--min-worker-port", "0", "--max-worker-port", "0"]
    options += ["--node-ip-address", NODE_IP, "--object-store-memory", str(2**28)]
    options += ["--include-dashboard", "false", "--include-log-monitor", "false", "--disable-usage-stats"]
    head = cluster.start("ray start", *options, "--temp-dir", str(cluster.folder))
    _wait_for_port(head, NODE_IP, cluster.port("port"), cluster)
    proxy = cluster.start("serve start", "--http-port", str(cluster.port("http")))
    assert proxy.wait(timeout=300) == 0, cluster.last_words()


def _wait_for_port(process: subprocess.Popen[bytes], host: str, port: int, cluster: RayCluster) -> None:
    until = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        assert process.poll() is None, cluster.last_words()
        assert time.monotonic() < until, cluster.last_words()
        time.sleep(0.3)


def _keep_logs(cluster: RayCluster, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for log in [*cluster.folder.glob("*.log"), *cluster.folder.glob("session_latest/logs/**/*.*")]:
        if log.is_file() and log.stat().st_size:
            shutil.copyfile(log, target / log.name)


def streaming_words() -> list[str]:
    """Return the arguments with which the documented app streams; these replicas lie on loopback."""
    (line,) = _fenced("sh")[1].splitlines()
    words = [word for word in shlex.split(line) if word.startswith("connector=")]
    assert "10.0.0.0/8" in words[0]
    return [words[0].replace("10.0.0.0/8", "127.0.0.0/8")]


def _fenced(language: str) -> list[str]:
    """Return the blocks of the documentation in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def _command(name: str) -> str:
    """Return the command under *Run it* that begins with these words."""
    (line,) = [line for line in _fenced("sh")[0].splitlines() if line.startswith(name)]
    return line


def _as_vllm(page: str) -> str:
    """Return a page of Ray's with vLLM's names: Ray puts `ray_` before them and has no colons."""
    return re.sub(r"^ray_vllm_", "vllm:", page, flags=re.MULTILINE)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def _read(number: int, name: str) -> str:
    try:
        return (Path("/proc") / str(number) / name).read_text(errors="replace")
    except OSError:
        return ""
