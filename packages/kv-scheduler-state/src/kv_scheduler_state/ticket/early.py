"""The early ticket: `kv_stream`, which a router puts into both requests of a hand-over that it starts at once.

It names the id under which the two engines know the hand-over, and the address of the prefill engine's side channel. It grants
nothing: the decode engine asks there, with the digest of its own prompt, and the answer says what it may read. But by asking, an
engine reveals its prompt's digest to that address. So the address must be *covered*: by the router's MAC under a fleet secret,
or without secrets by a list of peers. With neither, the early ticket is refused and the hand-over is plain.

With `withdraw` set to true beside these keys, a router tells the prefill engine that the prompt of this id will not come.

Bytes under the MAC (HMAC-SHA-256; integers have 8 bytes, signed, little-endian; a text is its length in bytes, then UTF-8):

| part | content |
|---|---|
| tag | `kv-early-1` and one zero byte |
| texts | id, host |
| integer | port |

Example: an id of 32 characters, host `10.0.0.1` and a port are 11 + (8 + 32) + (8 + 8) + 8 = 75 bytes.
"""

from __future__ import annotations

import hmac
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, final

from kv_scheduler_state.errors import TicketError, field_error, quote
from kv_scheduler_state.ticket.ticket import encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_scheduler_state.hosts import HostPolicy
    from kv_scheduler_state.ticket.seal import TicketSeal

__all__ = [
    "EARLY_KEY",
    "EarlyTicket",
    "canonical_early",
    "early_params",
    "is_withdrawal",
    "named_id",
    "prefill_request_params",
    "read_early",
]

EARLY_KEY: Final = "kv_stream"
_ID: Final = re.compile(r"[0-9a-f]{32}\Z")
_KEYS: Final = frozenset(("id", "host", "port"))
_MOST_KEYS: Final = 16
_MOST_HOST_CHARS: Final = 253


@final
class EarlyTicket(NamedTuple):
    """A hand-over on which both engines work at the same time.

    Attributes:
        hand_over_id: 128 random bits as 32 lower-case hexadecimal digits; both requests carry it.
        host: Address of the prefill engine's side channel.
        port: Its port.
    """

    hand_over_id: str
    host: str
    port: int


def early_params(early: EarlyTicket, secret: bytes | None = None) -> dict[str, object]:
    """Return the value of `kv_stream` as a router writes it, with a MAC if it has a fleet secret."""
    params: dict[str, object] = {"id": early.hand_over_id, "host": early.host, "port": early.port}
    if secret is not None:
        params["mac"] = hmac.digest(secret, canonical_early(early), "sha256").hex()
    return params


def prefill_request_params(
    early: tuple[str, str, int] | None = None, *, secret: bytes | None = None
) -> dict[str, object]:
    """Return the `kv_transfer_params` with which a router asks an engine to prefill and hand over.

    Args:
        early: (id, host, port) of a streamed hand-over: 32 random lower-case hexadecimal digits, and the side channel of the
            engine that prefills. The decode engine's request gets the same `kv_stream`, and `do_remote_prefill` alone.
        secret: A fleet secret for the MAC that covers the address.
    """
    params: dict[str, object] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    if early is not None:
        params[EARLY_KEY] = early_params(EarlyTicket(*early), secret)
    return params


def canonical_early(early: EarlyTicket) -> bytes:
    """Return the bytes under an early ticket's MAC; see the top of this module."""
    return encode("kv-early-1", early.hand_over_id, early.host, early.port)


def read_early(fields: Mapping[object, Any], hosts: HostPolicy, seal: TicketSeal | None) -> EarlyTicket:
    """Return the early ticket in `kv_transfer_params`.

    Args:
        fields: The params, with the key `kv_stream`.
        hosts: Where this engine may connect to.
        seal: This engine's secrets, None if it has none.

    Raises:
        TicketError: `ticket-type`, `ticket-missing`, `ticket-text`, `ticket-range`, `ticket-host`, `ticket-seal`, or
            `ticket-early-uncovered` where neither a secret nor a list of peers says which addresses are allowed.
    """
    value: object = fields.get(EARLY_KEY)
    if type(value) is not dict:
        raise field_error("ticket-type", EARLY_KEY, f"is {quote(value)}; it must be an object")
    early, mac = _parsed(cast("dict[object, object]", value))
    hosts.require(early.host)
    hosts.require_port(early.port)
    if seal is not None:
        if not seal.covers(canonical_early(early), mac):
            raise TicketError(
                "ticket-seal",
                f"no fleet secret of this engine covers the address {quote(early.host)} port {early.port} of {EARLY_KEY}: give "
                "the router one of the fleet's secrets",
                field="mac",
            )
    elif not hosts.names_peers:
        raise TicketError(
            "ticket-early-uncovered",
            f"nothing says whether {quote(early.host)} is an engine of this fleet, so no prompt is streamed from there; "
            "configure fleet secrets, or the networks of the peers",
            field="host",
        )
    return early


def is_withdrawal(fields: Mapping[object, Any]) -> bool:
    """Return whether the params withdraw a hand-over instead of starting one."""
    value: object = fields.get(EARLY_KEY)
    return type(value) is dict and cast("dict[object, object]", value).get("withdraw") is True


def named_id(fields: Mapping[object, Any], seal: TicketSeal | None) -> str:
    """Return the hand-over id of an early ticket, even of one that is refused; empty if there is none.

    Where this engine has secrets, an id counts only under a good MAC: anybody could name the id of another hand-over.
    """
    value: object = fields.get(EARLY_KEY)
    if type(value) is not dict:
        return ""
    found = cast("dict[object, object]", value)
    if seal is None:
        identity = found.get("id")
        return identity if type(identity) is str and _ID.match(identity) else ""
    try:
        early, mac = _parsed(found)
    except TicketError:
        return ""
    return early.hand_over_id if seal.covers(canonical_early(early), mac) else ""


def _parsed(value: dict[object, object]) -> tuple[EarlyTicket, object]:
    """Return the early ticket and its MAC, each field checked by itself."""
    if len(value) > _MOST_KEYS:  # before unknown keys are sorted and quoted
        raise field_error("ticket-type", EARLY_KEY, f"has {len(value)} keys, at most {_MOST_KEYS} are allowed")
    missing = sorted(_KEYS - value.keys())
    if missing:
        raise field_error("ticket-missing", EARLY_KEY, f"has no {missing[0]}")
    known = _KEYS | ({"mac", "withdraw"} if value.get("withdraw") is True else {"mac"})
    unknown = sorted(quote(key) for key in value.keys() - known)
    if unknown:
        raise field_error("ticket-type", EARLY_KEY, f"has the key {unknown[0]}, which no router writes")
    identity, host, port = value["id"], value["host"], value["port"]
    if type(identity) is not str or not _ID.match(identity):
        raise field_error("ticket-text", "id", f"is {quote(identity)}; it must be 32 digits of 0-9 a-f")
    if type(host) is not str or not 0 < len(host) <= _MOST_HOST_CHARS or not host.isascii():
        raise field_error("ticket-text", "host", f"is {quote(host)}; it must be an address or a name")
    if type(port) is not int:
        raise field_error("ticket-type", "port", f"is {quote(port)}; it must be an integer")
    if not 1 <= port <= 65535:
        raise field_error("ticket-range", "port", f"is {quote(port)}, must be 1 to 65535")
    return EarlyTicket(identity, host, port), value.get("mac")
