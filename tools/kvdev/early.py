"""Early tickets of the demo router: both requests of a hand-over name its id and the prefill engine's side channel.

[docs/wire/ticket.md](../../docs/wire/ticket.md#early-ticket) has the format; this is all that a router needs of it.
"""

from __future__ import annotations

import hmac
import struct
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, final

from kvdev.steps import fail

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Mapping, Sequence

__all__ = ["EarlyTickets", "add_early_options", "early_tickets", "parse_side_channel"]

_LENGTH = struct.Struct("<q")


@final
class EarlyTickets:
    """Writes early tickets for prefill engines.

    Args:
        urls: Base URLs of the prefill engines.
        side_channels: (host, port) of their side channels, in the same order.
        secret: A secret of the fleet, under which the address is covered; None without.
    """

    def __init__(
        self, urls: Sequence[str], side_channels: Sequence[tuple[str, int]], secret: bytes | None = None
    ) -> None:
        self._channels = {url.rstrip("/"): channel for url, channel in zip(urls, side_channels, strict=True)}
        self._secret = secret

    def new(self, url: str) -> Mapping[str, object]:
        """Return `kv_stream` of a new hand-over from this engine."""
        host, port = self._channels[url]
        identity = uuid.uuid4().hex
        params: dict[str, object] = {"id": identity, "host": host, "port": port}
        if self._secret is not None:
            message = b"kv-early-1\0" + _text(identity) + _text(host) + _LENGTH.pack(port)
            params["mac"] = hmac.digest(self._secret, message, "sha256").hex()
        return params


def add_early_options(parser: ArgumentParser) -> None:
    """Add the options by which the router sends each request to both engines at once."""
    parser.add_argument(
        "--concurrent",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="send each request to both engines at once; the side channel of each prefill engine, in their order (repeatable)",
    )
    parser.add_argument(
        "--secret-file", default="", metavar="FILE", help="a file with a fleet secret, which covers these addresses"
    )


def early_tickets(prefill: Sequence[str], channels: Sequence[str], secret_file: str) -> EarlyTickets | None:
    """Return what writes early tickets, None without side channels; end the process with a reason if it cannot be made."""
    if not channels:
        return None
    try:
        secret = Path(secret_file).read_bytes().splitlines()[0].strip() if secret_file else None
        return EarlyTickets(prefill, [parse_side_channel(each) for each in channels], secret)
    except (OSError, ValueError, IndexError) as error:
        fail(f"router: {error}; give --concurrent HOST:PORT once for each --prefill")


def parse_side_channel(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[IPv6]:PORT``.

    Raises:
        ValueError: It is neither.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _text(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data
