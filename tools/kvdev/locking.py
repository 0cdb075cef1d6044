"""`dev.py lock`: renew the lock file and make its addresses neutral, or prove that a re-resolution binds the same.

`uv.lock` is committed with neutral addresses (docs/adr/0001): uv re-resolves with the locked versions as preferences and
fetches from whatever index the machine uses. While it runs it writes that index into the file, so the committed bytes are put
back afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from kvdev.paths import LOCK, STATE
from kvdev.steps import fail, note, run_step
from kvdev.uvtool import uv_environment

_NEUTRAL = "https://index.invalid/"
_REGISTRY = re.compile(r'(registry = ")(?!https://index\.invalid/)[^"]+(")')
_FILE = re.compile(r'((?:url|path) = ")(?!https://index\.invalid/)(?:https?|file)://[^"]*?([^"/#]+)("|#[^"]*")')


def neutralise(text: str) -> str:
    """Rewrite every download address to a neutral one, keeping file names and hashes."""
    text = _REGISTRY.sub(rf"\g<1>{_NEUTRAL}simple\g<2>", text)
    return _FILE.sub(rf"\g<1>{_NEUTRAL}files/\g<2>\g<3>", text)


def is_neutral(text: str) -> bool:
    """Tell whether no address but the neutral one is left."""
    return neutralise(text) == text and re.search(r"https?://(?!index\.invalid/)", text) is None


def bindings(text: str) -> set[str]:
    """Return what a lock binds: `name==version hash` of each file."""
    found: set[str] = set()
    for package in tomllib.loads(text).get("package", []):
        files = [*package.get("wheels", []), *filter(None, [package.get("sdist")]), {}]
        found |= {f"{package['name']}=={package.get('version', '')} {file.get('hash', '')}" for file in files}
    return found


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


@contextlib.contextmanager
def preserved_lock() -> Iterator[str]:
    """Put the neutral `uv.lock` back, whatever uv writes into it meanwhile; yield its text."""
    before = neutralise(LOCK.read_text())
    try:
        yield before
    finally:
        if LOCK.read_text() != before:
            LOCK.write_text(before)


def run_lock(uv: Path, options: Namespace) -> int:
    """Resolve again (with `upgrade`, to the newest versions) and write a neutral `uv.lock`.

    With `check`, prove that the committed lock is neutral and that resolving again gives the same versions and hashes.
    """
    if options.check and not is_neutral(LOCK.read_text()):
        fail("uv.lock names a real index; run `python3 tools/dev.py lock` and commit the result")
    with exclusive(), preserved_lock() as before:
        words = ["--upgrade"] if options.upgrade else []
        run_step("uv lock", [uv, "lock", *words], env=uv_environment(), timeout_s=600)
        text = neutralise(LOCK.read_text())
    old, new = bindings(before), bindings(text)
    changed = [f"  gone: {each}" for each in sorted(old - new)] + [f"  new: {each}" for each in sorted(new - old)]
    if not options.check:
        LOCK.write_text(text)
        note("\n".join(changed) or "nothing changed")
    elif changed:
        fail("a re-resolution differs from uv.lock; run `python3 tools/dev.py lock`:\n" + "\n".join(changed))
    else:
        note("uv.lock: a re-resolution gives the same versions and hashes; addresses are neutral")
    return 0
