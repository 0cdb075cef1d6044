"""A hand-over between the previous release's wheels and this tree, both ways, in two processes over real NIXL.

The wheels are built once from the previous release's revision into `.dev/previous`, in an environment that takes third-party
packages from this tree's own and our packages from those wheels alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from line_process import LineProcess

ROOT = Path(__file__).resolve().parents[2]
REVISION = "6dc1ea4"
OLD = ROOT / ".dev" / "previous"
HERE = Path(__file__).parent / "previous"
PACKAGES = ("kv-handshake", "kv-topology", "kv-nixl-agent", "kv-scheduler-state", "vllm-adapter")
sys.path.insert(0, str(ROOT / "tools"))


def _start(python: Path, folder: Path, name: str, vllm: str) -> LineProcess:
    # Contents are drawn from hashes of request ids, so both processes must hash alike.
    env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": ""}
    with (OLD / f"{name}.log").open("w") as log:
        return LineProcess([python, HERE / "driver.py", folder, name, vllm], stderr=log, env=env)


def _run(*command: str | Path) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, f"{command}: {finished.stdout}\n{finished.stderr}"


@pytest.fixture(scope="session")
def old_python() -> Path:
    """The python of an environment that holds the previous release's five wheels."""
    python, stamp = OLD / "venv" / "bin" / "python", OLD / "stamp"
    wanted = f"{REVISION} {sys.version} {sysconfig.get_path('purelib')}"
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return python
    archive = subprocess.run(["git", "-C", ROOT, "archive", REVISION], capture_output=True, check=False, timeout=60)
    if archive.returncode != 0:
        pytest.skip(f"revision {REVISION} is not in this clone (a shallow one?): {archive.stderr.decode().strip()}")
    from kvdev.uvtool import find_or_install_uv, uv_environment

    uv = find_or_install_uv()
    os.environ.update({k: v for k, v in uv_environment().items() if k.startswith(("UV_", "SSL_"))})
    shutil.rmtree(OLD, ignore_errors=True)
    (OLD / "source").mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", OLD / "source"], input=archive.stdout, check=True, timeout=60)
    for name in PACKAGES:
        _run(uv, "build", "--wheel", "--quiet", "--out-dir", OLD / "wheels", OLD / "source" / "packages" / name)
    _run(uv, "venv", "--quiet", "--python", sys.executable, OLD / "venv")
    _run(
        uv, "pip", "install", "--no-config", "--quiet", "--no-deps", "--python", python, *(OLD / "wheels").glob("*.whl")
    )
    # A plain path in a .pth file is searched last, and the .pth files in it (our editable packages) are not read.
    site = next((OLD / "venv" / "lib").glob("python*/site-packages"))
    (site / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    stamp.write_text(wanted)
    return python


@pytest.fixture
def engines(old_python: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, LineProcess]]:
    """An engine of each release; the parameter is the current one's version of vLLM."""
    started = {
        "previous": _start(old_python, OLD / "source" / "integration_tests" / "sim", "previous", "0.32.0"),
        "current": _start(Path(sys.executable), ROOT / "integration_tests" / "fakes", "current", request.param),
    }
    try:
        for name, process in started.items():
            assert process.answer() == {"ready": name}
        yield started
    finally:
        codes = {name: process.end() for name, process in started.items()}
    assert codes == {"previous": 0, "current": 0}, f"an engine did not end well; the logs are in {OLD}"


def test_the_previous_release_is_what_is_installed(old_python: Path) -> None:
    code = "import kv_topology, vllm_adapter, importlib.metadata as m; print(m.version('vllm-adapter'), kv_topology.__file__)"
    said = subprocess.run([old_python, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.startswith("0.1.0 ")
    assert str(OLD) in said


@pytest.mark.parametrize(
    ("engines", "producer", "consumer"),
    # The previous release reads from engines with its own version of vLLM alone.
    [("0.32.0", "previous", "current"), ("0.32.0", "current", "previous"), ("0.32.1", "previous", "current")],
    indirect=["engines"],
)
def test_a_hand_over_between_releases(engines: dict[str, LineProcess], producer: str, consumer: str) -> None:
    """Whole blocks, a partial last block, one token, a prefix hit; the reader's notification ends each lease."""
    for tokens, hit_blocks in ((64, 0), (37, 0), (1, 0), (48, 1)):
        made = engines[producer].ask(do="prefill", tokens=tokens)
        assert made["ticket"] is not None
        order = {"ticket": made["ticket"], "tokens": tokens, "source": made["id"], "hit_blocks": hit_blocks}
        assert engines[consumer].ask(do="decode", **order) == {"ok": True}
        assert engines[producer].ask(do="idle") == {"held": []}
