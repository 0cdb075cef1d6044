"""Programs of Debian's packages, unpacked in `.dev` where the machine lacks them; nothing is installed in the system."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvdev.locking import exclusive
from kvdev.paths import STATE


def find_debian_program(program: str, *packages: str) -> Path:
    """Return a program of this machine, or of Debian's packages, unpacked in `.dev`; skip the test where neither is possible."""
    folder = STATE / packages[0]
    if found := shutil.which(program):
        return Path(found)
    with exclusive():
        if not (folder / "usr/bin" / program).exists():
            (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
            # Lists of packages that the machine lacks are kept here, not in the system.
            apt, names = f"apt-get -q -o Dir::State::Lists={folder}/lists -o Dir::Cache={folder}", " ".join(packages)
            fetch = f"apt-get -q download {names} || {{ {apt} update && {apt} download {names}; }}"
            command = ["sh", "-c", f"({fetch}) && for each in *.deb; do dpkg-deb -x $each . || exit; done"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
            if done.returncode != 0:
                pytest.skip(f"{program} is not here, and Debian's package was not unpacked: {done.stderr[-300:]}")
    return folder / "usr/bin" / program
