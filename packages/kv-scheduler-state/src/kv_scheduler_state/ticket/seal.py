"""The seal of a ticket: HMAC-SHA-256 under a fleet secret, over everything that a consumer acts on.

The seal is computed from the *validated value* of a ticket, never from its text, so the consumer acts on exactly the value that
was verified. Keys that a router adds, another order of keys and numbers that were kept as doubles do not break the seal, and no
two readers can understand a sealed ticket differently.

Bytes under the seal (integers: 8 bytes, signed, little-endian, -1 for absent; seconds: IEEE 754 double, little-endian, -1.0 for
absent; text: its length in bytes as an integer, then UTF-8; absent text: the length -1 alone):

| part | content |
|---|---|
| tag | `kv-ticket-1` and one zero byte |
| integers | kind (1 hand-over, 2 readback), port, tp, pp, dcp, generation, dialect |
| integers | tokens, fence slot, fence generation, transfer mode (1 for "pull", 0 for none) |
| seconds | lease, expiry clock |
| texts | engine id, host, request id, nonce, prompt digest |
| groups | their number, then for each: first token, null block, number of ids, and each id in 4 bytes, unsigned |
| spans | their number, then tokens per block of each group |

Example: a ticket of engine `p0` at `10.0.0.1`, request `r`, nonce `n`, no digest, one group of 3 blocks and its span is
12 + 11 * 8 + 2 * 8 + (8 + 2) + (8 + 8) + (8 + 1) + (8 + 1) + 8 + 8 + (3 * 8 + 3 * 4) + 8 + 8 = 228 bytes.

A fleet secret is any string of 16 bytes or more, used as the HMAC key as it is. Of several secrets, the first one seals and all
verify. To rotate, add the new secret at the end everywhere, then move it to the front everywhere, then remove the old one.
"""

from __future__ import annotations

import hmac
import sys
from array import array
from typing import TYPE_CHECKING, Final, NoReturn, cast, final

from kv_scheduler_state.errors import InvalidConfig, TicketError, quote
from kv_scheduler_state.hosts import HostPolicy
from kv_scheduler_state.ticket.reader import MAX_BLOCKS
from kv_scheduler_state.ticket.ticket import WHOLE_NUMBERS, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state.ticket.reader import Fields, TicketReader
    from kv_scheduler_state.ticket.ticket import HandoffTicket, TicketKind

__all__ = ["MIN_SECRET_BYTES", "TicketSeal", "canonical_ticket"]

MIN_SECRET_BYTES: Final = 16
_MAX_EXACT: Final = float(1 << 53)
_MAY_BE_DOUBLES: Final = frozenset(("ticket-type", "ticket-blocks", "ticket-range", "ticket-first-token"))


@final
class TicketSeal:
    """Seals the tickets of one engine and opens those of its peers.

    Neither its text nor anything that it raises shows a secret, and it cannot be pickled.

    Args:
        secrets: Fleet secrets: the first one seals, all verify.
        unsealed_networks: Networks (CIDR) whose engines are known to write no seals; tickets from everywhere else need one.

    Raises:
        InvalidConfig: `invalid-config`, for no secret, a short one, or an invalid network.
    """

    def __init__(self, secrets: Sequence[bytes], unsealed_networks: tuple[str, ...] = ()) -> None:
        if not secrets or any(type(s) not in {bytes, bytearray} or len(s) < MIN_SECRET_BYTES for s in secrets):
            raise InvalidConfig(
                f"{len(secrets)} fleet secrets, the shortest of {min(map(len, secrets), default=0)} bytes; at least one is "
                f"needed, each as {MIN_SECRET_BYTES} bytes or more"
            )
        self._secrets = tuple(map(bytes, secrets))
        self._unsealed = HostPolicy(unsealed_networks, setting="unsealed_networks") if unsealed_networks else None

    def __repr__(self) -> str:
        return f"TicketSeal({len(self._secrets)} secrets)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TicketSeal holds fleet secrets and is not pickled")

    def of(self, ticket: HandoffTicket) -> str:
        """Return the seal of a ticket of this engine, as 64 hexadecimal digits."""
        return hmac.digest(self._secrets[0], canonical_ticket(ticket), "sha256").hex()

    def covers(self, message: bytes, mac: object) -> bool:
        """Return whether a fleet secret made this MAC (64 hexadecimal digits) of a message, whose tag names its kind."""
        if type(mac) is not str or not mac.isascii():
            return False
        return any(hmac.compare_digest(hmac.digest(key, message, "sha256").hex(), mac) for key in self._secrets)

    def opened(self, reader: TicketReader, fields: Fields, kind: TicketKind) -> HandoffTicket:
        """Return the validated ticket if a fleet secret has sealed exactly this ticket, or if its host needs no seal.

        Raises:
            TicketError: `ticket-seal`, or as `TicketReader.read`.
        """
        seal = fields.get("kv_seal")
        if seal is None:
            self._require_unsealed(fields)
            return reader.read(fields, kind)
        try:
            ticket = reader.read(fields, kind)
        except TicketError as error:
            if error.code not in _MAY_BE_DOUBLES:
                raise
            ticket = reader.read(_without_doubles(fields), kind)
        if self.covers(canonical_ticket(ticket, str(fields["remote_host"])), seal):
            return ticket
        raise TicketError(
            "ticket-seal",
            f"no fleet secret of this engine has sealed this ticket of engine {quote(ticket.peer.engine_id)}: it was changed on "
            "its way, or that engine has other secrets",
        )

    def _require_unsealed(self, fields: Fields) -> None:
        """Refuse a ticket without a seal unless its host lies in a network whose engines write no seals."""
        host = fields.get("remote_host")
        if self._unsealed is not None and type(host) is str and not self._unsealed.refusal(host):
            return
        raise TicketError(
            "ticket-seal",
            f"the ticket for host {quote(host)} has no seal, and this engine requires one; engines of another kind must be named "
            "in its configuration",
        )


def canonical_ticket(ticket: HandoffTicket, host: str = "") -> bytes:
    """Return the bytes under a ticket's seal; `host` is the ticket's own spelling of the host, if `ticket` has another.

    See the top of this module.
    """
    peer, spans = ticket.peer, ticket.span_tokens
    slot, generation = ticket.fence or (-1, -1)
    return encode(
        "kv-ticket-1",
        1 if ticket.kind == "handoff" else 2,
        peer.port,
        peer.tp,
        peer.pp,
        peer.dcp,
        peer.generation,
        peer.dialect,
        ticket.peer_tokens,
        slot,
        generation,
        0 if ticket.transfer_mode is None else 1,
        -1.0 if ticket.lease_s is None else float(ticket.lease_s),
        -1.0 if ticket.expiry_clock_s is None else float(ticket.expiry_clock_s),
        peer.engine_id,
        host or peer.host,
        ticket.peer_request_id,
        ticket.nonce,
        ticket.prompt,
        len(ticket.peer_blocks),
        *[
            field
            for ids, first_token, null in ticket.peer_blocks
            for field in (first_token, null, len(ids), _packed_ids(ids))
        ],
        len(spans),
        *spans,
    )


def _packed_ids(ids: Sequence[int]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _without_doubles(fields: Fields) -> Fields:
    """Return the ticket with whole numbers for doubles that hold one, such as 5600 for 5600.0; the seal decides.

    A list of too many numbers stays as it is, since no reader takes it.
    """
    whole = dict(fields)
    for key in WHOLE_NUMBERS.intersection(fields):
        value: object = fields[key]
        if type(value) is not list or _count(cast("list[object]", value)) <= MAX_BLOCKS:
            whole[key] = _whole(fields[key], 2)
    return whole


def _count(value: list[object]) -> int:
    """Return the total number of entries of a list and its inner lists, or its own length if that is too large."""
    if len(value) > MAX_BLOCKS:
        return len(value)
    return len(value) + sum([len(cast("list[object]", each)) for each in value if type(each) is list])


def _whole(value: object, depth: int) -> object:
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) < _MAX_EXACT else value
    if depth and type(value) is list:
        return [_whole(each, depth - 1) for each in cast("list[object]", value)]
    return value
