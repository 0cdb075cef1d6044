"""Prometheus and promtool of this machine, or of Debian's package, unpacked in `.dev` without being installed."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdev.engines import die_with_parent, free_port
from kvdev.paths import STATE
from kvdev.steps import DevError, end_process, fail
from kvdev.uvtool import exclusive

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PrometheusTools", "find_prometheus", "query", "rule_states", "running_prometheus"]

_FOLDER: Final = STATE / "prometheus"
_READY_WITHIN_S: Final = 60.0
_FETCHED_WITHIN_S: Final = 120


@dataclass(frozen=True, slots=True)
class PrometheusTools:
    """Paths of the programs."""

    prometheus: Path
    promtool: Path


def find_prometheus() -> PrometheusTools | str:
    """Return the programs, or the reason why there are none here; the package is fetched once (19 MB)."""
    found = _on_path() or _unpacked()
    if found:
        return found
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return "prometheus is not on the path, and this is no Debian whose package could be unpacked"
    with exclusive():
        found = _unpacked()
        if found:
            return found
        try:
            _fetch()
        except (OSError, subprocess.SubprocessError) as error:
            return f"prometheus is not on the path, and apt-get did not download it: {error}"
    return _unpacked() or "Debian's package of prometheus has no promtool any more"


def _on_path() -> PrometheusTools | None:
    server, tool = shutil.which("prometheus"), shutil.which("promtool")
    return PrometheusTools(Path(server), Path(tool)) if server and tool else None


def _unpacked() -> PrometheusTools | None:
    tools = PrometheusTools(_FOLDER / "usr/bin/prometheus", _FOLDER / "usr/bin/promtool")
    return tools if tools.prometheus.exists() and tools.promtool.exists() else None


def _fetch() -> None:
    """Download the package and unpack it; lists of packages that the machine lacks are kept in `.dev`, not in the system."""
    half = _FOLDER.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    (half / "lists/partial").mkdir(parents=True)
    ours = ["-o", f"Dir::State::Lists={half / 'lists'}", "-o", f"Dir::Cache={half}"]
    try:
        if not _apt(half, "download", "prometheus"):
            _apt(half, *ours, "update")
            _apt(half, *ours, "download", "prometheus")
        (package,) = half.glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "-x", package, half / "out"], check=True, capture_output=True, timeout=60)
        shutil.rmtree(_FOLDER, ignore_errors=True)
        (half / "out").rename(_FOLDER)
    except ValueError as error:
        message = "no package named prometheus in its lists"
        raise OSError(message) from error
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _apt(folder: Path, *words: str) -> bool:
    done = subprocess.run(
        ["apt-get", "-q", *words], cwd=folder, check=False, capture_output=True, timeout=_FETCHED_WITHIN_S
    )
    return done.returncode == 0


@contextlib.contextmanager
def running_prometheus(tools: PrometheusTools, configuration: Path, folder: Path) -> Iterator[str]:
    """Run a Prometheus server on a free loopback port, its data in `folder`; yield its address."""
    port = free_port()
    command: list[str | Path] = [
        tools.prometheus,
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (one system call, no lock, no import)
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url, log)
        yield url
    finally:
        end_process(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise DevError("prometheus ended while starting:\n" + log.read_text(errors="replace")[-2000:])
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.1)
    fail(f"prometheus was not ready within {_READY_WITHIN_S:.0f} s; log: {log}")


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """Return what a server answers to an expression now: a list of samples, each with `metric` and `value`."""
    return list(_get(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")["result"])


def rule_states(url: str) -> dict[str, tuple[str, str]]:
    """Return (health, state) of each alert rule that a server has evaluated, e.g. ("ok", "inactive")."""
    groups = _get(f"{url}/api/v1/rules")["groups"]
    return {rule["name"]: (rule["health"], rule["state"]) for group in groups for rule in group["rules"]}


def _get(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return dict(json.load(answer)["data"])
    except urllib.error.HTTPError as error:
        return fail(f"prometheus answered HTTP {error.code}: {error.read().decode(errors='replace')[:500]}")
