"""`dev.py lock`: renew the lock file and make it neutral, or prove that a re-resolution binds the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdev.lockfile import bindings, is_neutral, neutralise
from kvdev.paths import LOCK
from kvdev.steps import fail, note, run_step
from kvdev.uvtool import exclusive, uv_environment

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_lock", "renew_lock"]


def renew_lock(uv: Path, *, upgrade: bool) -> int:
    """Resolve again (with `upgrade`, to the newest versions) and write a neutral `uv.lock`."""
    with exclusive():
        before = LOCK.read_text() if LOCK.exists() else ""
        try:
            run_step("uv lock", [uv, "lock", *(["--upgrade"] if upgrade else [])], env=uv_environment(), timeout_s=600)
            LOCK.write_text(neutralise(LOCK.read_text()))
        except BaseException:
            if before:
                LOCK.write_text(before)
            raise
    changed = _differences(bindings(before) if before else {}, bindings(LOCK.read_text()))
    note("\n".join(changed) if changed else "nothing changed")
    return 0


def check_lock(uv: Path) -> int:
    """Prove that the committed lock is neutral and that resolving again gives the same versions and hashes."""
    committed = LOCK.read_text()
    if not is_neutral(committed):
        fail("uv.lock names a real index; run `python3 tools/dev.py lock` and commit the result")
    with exclusive():
        try:
            run_step("uv lock (re-resolution)", [uv, "lock"], env=uv_environment(), timeout_s=600)
            resolved = LOCK.read_text()
        finally:
            LOCK.write_text(committed)
    changed = _differences(bindings(committed), bindings(resolved))
    if changed:
        fail("a re-resolution differs from uv.lock; run `python3 tools/dev.py lock`:\n" + "\n".join(changed))
    print(
        f"uv.lock: {len(bindings(committed))} packages, the same versions and hashes after a re-resolution; addresses neutral"
    )
    return 0


def _differences(before: dict[str, frozenset[str]], after: dict[str, frozenset[str]]) -> list[str]:
    lines = [f"  gone: {key}" for key in sorted(before.keys() - after.keys())]
    lines += [f"  new: {key}" for key in sorted(after.keys() - before.keys())]
    lines += [f"  other hashes: {key}" for key in sorted(before.keys() & after.keys()) if before[key] != after[key]]
    return lines
