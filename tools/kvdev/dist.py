"""`dev.py dist`: wheels and source archives of all five packages, as a release would build them, into one folder.

`requirements.txt` beside them pins the five wheels by version and hash, so that they are installed from this folder alone: no
index is asked for them, where anyone may have registered one of their names.
"""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING

from kvdev.envs import tools_environment
from kvdev.paths import PACKAGES, ROOT, STATE
from kvdev.staging import stage
from kvdev.steps import fail, run_step
from kvdev.uvtool import uv_environment

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["build_all", "run_dist"]


def run_dist(uv: Path, folder: Path) -> int:
    """Build all files and let twine and check-wheel-contents judge them; return 0 when they are good."""
    files = build_all(uv, folder.resolve())
    tools = tools_environment(uv, "release").parent
    run_step("check metadata", [tools / "twine", "check", "--strict", *files])
    wheels = [file for file in files if file.suffix == ".whl"]
    run_step("check contents", [tools / "check-wheel-contents", *wheels])
    print("\n".join(str(file) for file in files))
    return 0


def build_all(uv: Path, folder: Path) -> list[Path]:
    """Build a wheel and a source archive of each package, and pin the wheels; files of other versions are removed first."""
    for stale in _ours(folder):
        stale.unlink()
    for name in PACKAGES:
        staged = STATE / "dist" / name
        shutil.rmtree(staged, ignore_errors=True)
        stage(ROOT / "packages" / name, staged)
        run_step(f"build {name}", [uv, "build", "--quiet", "--out-dir", folder, staged], env=uv_environment())
    files = _ours(folder)
    if len(files) != 2 * len(PACKAGES):
        fail(f"expected {2 * len(PACKAGES)} files in {folder}, found {[file.name for file in files]}")
    (folder / "requirements.txt").write_text("".join(_pin(file) for file in files if file.suffix == ".whl"))
    return files


def _pin(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{name.replace('_', '-')}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def _ours(folder: Path) -> list[Path]:
    found = [file for name in PACKAGES for file in folder.glob(f"{name.replace('-', '_')}-*")]
    return sorted(file for file in found if file.name.endswith((".whl", ".tar.gz")))
