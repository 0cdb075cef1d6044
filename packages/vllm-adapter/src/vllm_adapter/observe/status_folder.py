"""The private folder for the sockets on which engine processes answer `vllm-adapter status`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["SUFFIX", "make_private", "own_sockets", "status_folder", "status_folders"]

SUFFIX = ".sock"
_NAME = "vllm-adapter"
_TEMPORARY = Path("/tmp")  # noqa: S108  (the folder in it is this user's alone, or is not used)
_OTHERS_RIGHTS = 0o077


def status_folder() -> Path:
    """Return this process's socket folder: in `$XDG_RUNTIME_DIR` if that exists, else `/tmp/vllm-adapter-UID`."""
    return status_folders()[0]


def status_folders() -> tuple[Path, ...]:
    """Return every folder that an engine of this user may use: a service may lack the variables of a login session."""
    shared = _TEMPORARY / f"{_NAME}-{os.getuid()}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # `os.path.isdir` is false where a variable of another user or of any length makes `Path.is_dir` raise.
    return (Path(runtime) / _NAME, shared) if runtime and os.path.isdir(runtime) else (shared,)  # noqa: PTH112


def make_private(folder: Path) -> None:
    """Create a folder that only this user can enter; an existing folder must already be private.

    Raises:
        OSError: It cannot be created, or it is a link, another user's, or open to others.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    _require_private(folder)


def own_sockets(folder: Path) -> list[Path]:
    """Return the sockets in a folder that belongs to this user alone, sorted; links and other files are left out.

    Raises:
        OSError: There is no such folder, or it is a link, another user's, or open to others, who could put sockets there.
        ValueError: No folder can have this name.
    """
    _require_private(folder)
    return [file for file in sorted(folder.glob("*" + SUFFIX)) if _is_own_socket(file)]


def _is_own_socket(file: Path) -> bool:
    try:
        found = file.lstat()
    except FileNotFoundError:  # its process has ended meanwhile
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid()


def _require_private(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS_RIGHTS:
        raise PermissionError(f"{folder} is not a folder of user {os.getuid()} alone (0700); remove it")
