"""Values that many replies repeat, opened and checked once."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, final

from kv_handshake._errors import WireError
from kv_handshake._limits import MAX_LIST_BYTES, MAX_REGIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from msgspec import Raw

    from kv_handshake._policy import LocalOffer, Verdict

__all__ = ["MAX_SHARED_BYTES", "ListTable", "Repeated"]

MAX_SHARED_BYTES = 64 * 1024
"""Bytes of a list that a client keeps after a handshake; the names of 2000 regions take 60 kB."""


@final
class ListTable:
    """The decoders of a message's lists, by name.

    Attributes:
        decoders: All of them.
        alike: Names of the lists that the ranks of an engine have in common.
        differing: Names of the others.
        pick: Returns the values of `alike` from a mapping.
    """

    __slots__ = ("alike", "decoders", "differing", "pick")

    def __init__(self, decoders: Mapping[str, Callable[[Raw], Any]], *, differing: tuple[str, ...]) -> None:
        self.decoders = decoders
        self.differing = differing
        self.alike = tuple(name for name in decoders if name not in differing)
        self.pick: Callable[[Mapping[str, Any]], tuple[Raw, ...]] = itemgetter(*self.alike)


@final
class Repeated:
    """The last value of each list and of the factors, with their bytes; for one thread.

    The sessions of a client share short, immutable values. Maps and long lists are dropped with their session, because a caller
    may change a map, and no peer may make the client keep large values. The bytes of a short map are shared, so that it is
    checked only once.

    Attributes:
        client: The values that the sessions of a client share.
        good_verdict: Of a client's values: the last verdict without differences, with the offer and the claims it is about.
        checked_regions: Number of regions that the last lists of `ListTable.alike` have been found right for; -1 for none.
    """

    def __init__(self, client: Repeated | None = None) -> None:
        self.client = self if client is None else client
        self.good_verdict: tuple[LocalOffer, tuple[object, ...], Verdict] | None = None
        self._shared: dict[str, tuple[Raw, Any]] = {} if client is None else client._shared  # noqa: SLF001 - of this class
        self._own: dict[str, tuple[Raw, Any]] = {}
        self.checked_regions = -1
        self._alike: tuple[Raw, ...] | None = None
        self._opened: dict[str, Any] = {}

    def open_lists(self, values: dict[str, Any], table: ListTable) -> None:
        """Replace the bytes of all lists by their values.

        Raises:
            WireError: As `open`.
        """
        for name in table.differing:
            _check_size(name, values[name])
            values[name] = table.decoders[name](values[name])
        alike = table.pick(values)
        if self._alike != alike:
            self._alike, self.checked_regions = None, -1
            self._opened = {name: self.open(name, values[name], table.decoders[name]) for name in table.alike}
            self._alike = tuple(self._find(name)[0] for name in table.alike)
        values.update(self._opened)

    def open(
        self, name: str, raw: Raw, decoder: Callable[[Raw], Any], check: Callable[[Any], None] | None = None
    ) -> Any:  # noqa: ANN401 - the decoder's type
        """Return the decoded value: the last one of this name if its bytes are equal.

        Args:
            name: The value's name.
            raw: Its bytes.
            decoder: Decodes them.
            check: Called with the value unless equal bytes have been checked before.

        Raises:
            WireError: ``malformed-metadata``, or ``malformed-envelope`` for factors, if there are more bytes or entries than
                are read.
        """
        known = self._own.get(name) or self._shared.get(name)
        if known is not None and known[0] == raw:
            stored, value = known
            if value is ...:
                self._own[name] = known = (stored, decoder(stored))
            return known[1]
        _check_size(name, raw)
        value = decoder(raw)
        if check is not None:
            check(value)
        self._keep(name, raw.copy(), value)  # the bytes alone: `raw` holds the whole message
        return value

    def _keep(self, name: str, stored: Raw, value: object) -> None:
        is_short = len(memoryview(stored)) <= MAX_SHARED_BYTES
        can_change = isinstance(value, dict)
        self._own.pop(name, None)
        if can_change or not is_short:
            self._own[name] = stored, value
        if is_short:
            self._shared[name] = stored, ... if can_change else value

    def _find(self, name: str) -> tuple[Raw, Any]:
        return self._own.get(name) or self._shared[name]

    def shared_bytes(self, name: str) -> Raw | None:
        """Return the bytes of the value opened last, always the same object while they repeat; None if they are not shared."""
        stored = self._find(name)[0]
        return stored if name in self._shared and self._shared[name][0] is stored else None


def _check_size(name: str, raw: Raw) -> None:
    size_bytes, entries = len(memoryview(raw)), _entries(raw)
    if size_bytes > MAX_LIST_BYTES or entries > MAX_REGIONS:
        raise WireError(
            "malformed-metadata" if name != "factors" else "malformed-envelope",
            f"{name} has {entries} entries in {size_bytes} bytes; at most {MAX_REGIONS} in {MAX_LIST_BYTES} are read",
        )


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
