"""UCX transports that really carry reads: parsed from UCX's own protocol tables, not from its settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["TRANSPORT_ENVIRONMENT", "ReadPath", "is_tcp", "read_paths"]

TRANSPORT_ENVIRONMENT: Final[Mapping[str, str]] = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
"""Environment under which UCX prints its tables."""

_CELLS: Final = re.compile(r"\|([^|]*(?:\|[^|]*)*)\|\s*$")
_READ: Final = re.compile(r"remote memory read by ucp_get\S* into (\S+)(?: memory)?(?: from (\S+))?")


@final
@dataclass(frozen=True, slots=True)
class ReadPath:
    """How reads of a size range travel.

    Attributes:
        into: UCX's name of the local memory, for example `host` or `cuda`.
        source: UCX's name of the peer's memory.
        sizes: Range of bytes, as UCX prints it.
        method: For example `zero-copy`.
        config: Transport and device, for example `cma/memory` or `tcp/lo`.
    """

    into: str
    source: str
    sizes: str
    method: str
    config: str


def read_paths(log: str) -> Sequence[ReadPath]:
    """Return the paths of one-sided reads in UCX's log, in the order in which UCX printed them, without repetition."""
    paths: dict[ReadPath, None] = {}
    current: tuple[str, str] | None = None
    for line in log.splitlines():
        found = _CELLS.search(line)
        if found is None:
            continue
        cells = [cell.strip() for cell in found.group(1).split("|")]
        if len(cells) == 1:
            heading = _READ.search(cells[0])
            if heading is not None:
                current = (heading.group(1), heading.group(2) or "unknown")
            elif "cfg#" not in cells[0]:
                current = None
        elif current is not None and len(cells) == 3 and ".." in cells[0]:
            paths[ReadPath(*current, cells[0], cells[1], cells[2])] = None
    return list(paths)


def is_tcp(path: ReadPath) -> bool:
    """Whether a path goes over TCP, or is emulated by messages that may."""
    return "tcp" in path.config.lower() or "software emulation" in path.method.lower()
