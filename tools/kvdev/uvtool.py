"""Find or install uv, and run it without letting a real index into `uv.lock`.

`uv.lock` is committed with neutral addresses (docs/adr/0001): uv re-resolves with the locked versions as preferences and
fetches from whatever index the machine uses. While it runs it writes that index into the file, so every call here puts the
committed bytes back afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvdev.lockfile import is_neutral, neutralise
from kvdev.paths import LOCK, STATE
from kvdev.steps import fail, note, run_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["exclusive", "find_or_install_uv", "preserved_lock", "uv_environment", "uv_step"]

_PRIVATE = STATE / "uv"


def find_or_install_uv() -> Path:
    """Return a uv: the one on PATH, or a private one installed with pip into `.dev/uv`."""
    on_path = shutil.which("uv")
    if on_path:
        return Path(on_path)
    private = _PRIVATE / "bin" / "uv"
    if private.exists() and _answers(private):
        return private
    note("uv is not on PATH: installing a private one")
    shutil.rmtree(_PRIVATE, ignore_errors=True)
    try:
        run_step("make uv environment", [sys.executable, "-m", "venv", _PRIVATE], timeout_s=120)
        run_step(
            "install uv",
            [_PRIVATE / "bin" / "pip", "install", "--disable-pip-version-check", "--quiet", "uv>=0.9"],
            timeout_s=300,
        )
    except BaseException:
        shutil.rmtree(_PRIVATE, ignore_errors=True)
        raise
    if not _answers(private):
        shutil.rmtree(_PRIVATE, ignore_errors=True)
        fail("the uv that pip installed does not run; install uv yourself and put it on PATH")
    return private


def uv_environment() -> dict[str, str]:
    """Give uv what pip is configured with: uv does not read pip's configuration."""
    env = dict(os.environ)
    env.pop("VIRTUAL_ENV", None)
    for pip_key, uv_key in (
        ("find-links", "UV_FIND_LINKS"),
        ("index-url", "UV_DEFAULT_INDEX"),
        ("cert", "SSL_CERT_FILE"),
    ):
        value = _pip_setting(pip_key)
        if value and uv_key not in env:
            env[uv_key] = ",".join(value.split()) if uv_key == "UV_FIND_LINKS" else value
    env.setdefault("UV_LINK_MODE", "hardlink")
    env.setdefault("UV_NO_PROGRESS", "1")
    env["UV_PYTHON_DOWNLOADS"] = "never"
    return env


def uv_step(name: str, uv: Path, arguments: Sequence[str | Path], *, extra_env: dict[str, str] | None = None) -> Path:
    """Run uv as a step with `uv.lock` preserved; return the log."""
    with preserved_lock():
        _, log = run_step(name, [uv, *arguments], env={**uv_environment(), **(extra_env or {})}, timeout_s=900)
    return log


@contextlib.contextmanager
def preserved_lock() -> Iterator[None]:
    """Put the neutral `uv.lock` back, whatever uv writes into it meanwhile."""
    before = LOCK.read_text() if LOCK.exists() else None
    if before is not None and not is_neutral(before):
        before = neutralise(before)
    try:
        yield
    finally:
        if before is not None and LOCK.read_text() != before:
            LOCK.write_text(before)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Let one dev.py at a time change environments and the lock file of this checkout."""
    STATE.mkdir(exist_ok=True)
    with (STATE / "exclusive").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("another dev.py is preparing environments in this checkout; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _answers(uv: Path) -> bool:
    try:
        return subprocess.run([uv, "--version"], capture_output=True, timeout=30, check=False).returncode == 0
    except OSError:
        return False


def _pip_setting(key: str) -> str | None:
    value = os.environ.get("PIP_" + key.upper().replace("-", "_"))
    if value:
        return value
    base = sys.base_prefix
    finished = subprocess.run(
        [Path(base) / "bin" / "python3", "-m", "pip", "config", "get", f"global.{key}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return finished.stdout.strip() or None
