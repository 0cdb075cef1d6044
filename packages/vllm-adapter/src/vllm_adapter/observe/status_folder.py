"""The folder of the sockets on which processes of engines answer `vllm-adapter status`, and its rights."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["SUFFIX", "make_private", "status_folder", "status_folders"]

SUFFIX = ".sock"
_NAME = "vllm-adapter"
_TEMPORARY = Path("/tmp")  # noqa: S108  (the folder in it is this user's alone, or is not used)
_OTHERS_RIGHTS = 0o077


def status_folder() -> Path:
    """Return where this process puts its socket: in `$XDG_RUNTIME_DIR` where that is there, else `/tmp/vllm-adapter-UID`."""
    return status_folders()[0]


def status_folders() -> tuple[Path, ...]:
    """Return every folder that an engine of this user may have chosen: a service need not have the variables of a login."""
    shared = _TEMPORARY / f"{_NAME}-{os.getuid()}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # `os.path.isdir` is false where a variable of another user or of any length makes `Path.is_dir` raise.
    return (Path(runtime) / _NAME, shared) if runtime and os.path.isdir(runtime) else (shared,)  # noqa: PTH112


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter; one that is there must be so already.

    Raises:
        OSError: It cannot be made, or it is a link, somebody else's, or open to others.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS_RIGHTS:
        raise PermissionError(f"{folder} is not a folder of user {os.getuid()} alone (0700); remove it")
