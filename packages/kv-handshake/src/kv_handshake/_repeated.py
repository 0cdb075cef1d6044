"""Values that many replies repeat, opened and checked once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, final

from kv_handshake._errors import WireError
from kv_handshake._limits import MAX_LIST_BYTES, MAX_REGIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Raw

__all__ = ["MAX_SHARED_BYTES", "Repeated"]

MAX_SHARED_BYTES = 64 * 1024
"""Bytes of a list that a client keeps after a handshake; the names of 2000 regions take 60 kB."""


@final
class Repeated:
    """The last value of each list and of the factors, with their bytes; for one thread.

    The sessions of a client share short values that nobody can change. Maps and long lists end with their session: a caller may
    change the one, and no peer's word stays large.
    """

    def __init__(self, client: Repeated | None = None) -> None:
        self._shared: dict[str, tuple[Raw, Any]] = {} if client is None else client._shared  # noqa: SLF001 - of this class
        self._own: dict[str, tuple[Raw, Any]] = {}

    def open(self, name: str, raw: Raw, decoder: Callable[[Raw], Any]) -> Any:  # noqa: ANN401 - the decoder's type
        """Return the decoded value: the last one of this name if its bytes are equal.

        Raises:
            WireError: ``malformed-metadata``, or ``malformed-envelope`` for factors, if there are more bytes or entries than
                are read.
        """
        known = self._own.get(name) or self._shared.get(name)
        if known is not None and known[0] == raw:
            return known[1]
        size_bytes, entries = len(memoryview(raw)), _entries(raw)
        if size_bytes > MAX_LIST_BYTES or entries > MAX_REGIONS:
            raise WireError(
                "malformed-metadata" if name != "factors" else "malformed-envelope",
                f"{name} has {entries} entries in {size_bytes} bytes; at most {MAX_REGIONS} in {MAX_LIST_BYTES} are read",
            )
        value = decoder(raw)
        can_change = isinstance(cast("object", value), dict)
        self._own.pop(name, None)
        store = self._own if can_change or size_bytes > MAX_SHARED_BYTES else self._shared
        store[name] = (raw.copy(), value)  # the bytes alone: `raw` holds the whole message
        return value


def _entries(raw: Raw) -> int:
    """Return the entries of a list or a map from its first bytes; 0 for any other value.

    Example: ``dd 00 01 00 00`` begins a list of 65 536.
    """
    head = bytes(memoryview(raw)[:5])
    kind = head[0] if head else 0
    if kind in (0xDC, 0xDE):
        return int.from_bytes(head[1:3], "big")
    if kind in (0xDD, 0xDF):
        return int.from_bytes(head[1:5], "big")
    return kind & 0x0F if 0x80 <= kind <= 0x9F else 0
