"""Promtool of this machine, or of Debian's package of Prometheus, unpacked in `.dev` without being installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from kvdev.paths import STATE
from kvdev.uvtool import exclusive

__all__ = ["find_promtool"]

_FOLDER: Final = STATE / "prometheus"
_UNPACKED: Final = _FOLDER / "usr/bin/promtool"
_FETCHED_WITHIN_S: Final = 120


def find_promtool() -> Path | str:
    """Return the program, or the reason why it is not here; the package is fetched once (19 MB)."""
    found = shutil.which("promtool")
    if found:
        return Path(found)
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return "promtool is not on the path, and this is not a Debian whose package could be unpacked"
    with exclusive():
        if not _UNPACKED.exists():
            try:
                _fetch()
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                return f"promtool is not on the path, and apt-get did not download it: {error}"
    return _UNPACKED if _UNPACKED.exists() else "Debian's package of prometheus has no promtool any more"


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
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _apt(folder: Path, *words: str) -> bool:
    done = subprocess.run(
        ["apt-get", "-q", *words], cwd=folder, check=False, capture_output=True, timeout=_FETCHED_WITHIN_S
    )
    return done.returncode == 0
