"""Look-ups of host names on other threads, each name once at a time."""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Names"]

_LOOKUPS = 32
"""Names looked up at once. A thread is made only if all others are busy."""

_FRESH_S = 5.0
_MOST_KNOWN = 256


@final
class Names:
    """Finds the addresses of host names for one thread, which no slow name server keeps waiting.

    Requests for the same name share one look-up, and its answer for five seconds. So a name that many tickets give takes one of
    the 32 threads.

    Args:
        wake: Called when a look-up has ended, from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pool = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="kv-handshake-names")
        self._known: OrderedDict[str, tuple[float, Future[list[str]]]] = OrderedDict()

    def look_up(self, host: str) -> Future[list[str]]:
        """Return the look-up of a name, new or under way; its result is empty if the name has no address."""
        now_s = time.monotonic()
        since_s, lookup = self._known.get(host, (0.0, None))
        if lookup is None or (lookup.done() and not (now_s - since_s < _FRESH_S and lookup.result())):
            lookup = self._pool.submit(_addresses_of, host)
            self._known[host] = (now_s, lookup)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        lookup.add_done_callback(lambda _: self._wake())  # at once if it has ended already
        return lookup

    def close(self) -> None:
        """Drop look-ups that have not begun; those under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _addresses_of(host: str) -> list[str]:
    """Return the addresses of a name, IPv4 first, because vLLM binds only IPv4; none if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    ordered = sorted(found, key=lambda each: each[0] != socket.AF_INET)
    return list(dict.fromkeys(str(each[4][0]) for each in ordered))
