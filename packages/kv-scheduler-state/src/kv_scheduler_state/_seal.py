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

import sys
from array import array
from hashlib import sha256
from hmac import compare_digest
from struct import Struct
from typing import TYPE_CHECKING, Final, NoReturn, cast, final

from kv_scheduler_state._blocks import BlockList, new_tuple
from kv_scheduler_state._errors import InvalidConfig, TicketError, quote
from kv_scheduler_state._hosts import HostPolicy
from kv_scheduler_state._ticket import HandoffTicket, PeerAddress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_scheduler_state._ticket import TicketKind
    from kv_scheduler_state._ticket_reader import Fields, TicketReader

__all__ = ["MIN_SECRET_BYTES", "TicketSeal", "canonical_ticket"]

MIN_SECRET_BYTES: Final = 16
_TAG: Final = b"kv-ticket-1\0"
_FIXED: Final = Struct("<11q2d")
_GROUP: Final = Struct("<3q")
_NUMBER: Final = Struct("<q")
_ABSENT: Final = _NUMBER.pack(-1)
_BLOCK_BYTES: Final = 64
"""Block of SHA-256, to which HMAC pads its key."""
_MAX_EXACT: Final = float(1 << 53)
_NUMBERS: Final = frozenset(
    (
        "remote_block_ids",
        "remote_port",
        "tp_size",
        "pp_size",
        "dcp_size",
        "remote_num_tokens",
        "remote_registration_generation",
        "kv_generation",
        "kv_dialect",
        "kv_fence",
        "kv_first_tokens",
        "kv_span_tokens",
        "kv_null_block",
    )
)
"""Keys that hold whole numbers, or lists of them."""
_ONLY_INTEGERS: Final = frozenset((int,))
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

    __slots__ = ("_keys", "_unsealed")

    def __init__(self, secrets: Sequence[bytes], unsealed_networks: tuple[str, ...] = ()) -> None:
        if not secrets or min(map(len, secrets)) < MIN_SECRET_BYTES:
            raise InvalidConfig(
                f"{len(secrets)} fleet secrets, the shortest of {min(map(len, secrets), default=0)} bytes; at least one is "
                f"needed, each of {MIN_SECRET_BYTES} bytes or more"
            )
        self._keys = tuple([_Key(secret) for secret in secrets])
        self._unsealed = HostPolicy(unsealed_networks, setting="unsealed_networks") if unsealed_networks else None

    def __repr__(self) -> str:
        return f"TicketSeal({len(self._keys)} secrets)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TicketSeal holds fleet secrets and is not pickled")

    def of_params(self, params: Mapping[str, object], peer: PeerAddress) -> str:
        """Return the seal of a ticket that this engine has just written under its own address, as 64 hexadecimal digits."""
        return self._keys[0].mac(canonical_ticket(_written(params, peer)))

    def covers(self, message: bytes, mac: object) -> bool:
        """Return whether a fleet secret made this MAC (64 hexadecimal digits) of a message, whose tag names its kind."""
        if type(mac) is not str or not mac.isascii():
            return False
        return any(compare_digest(key.mac(message), mac) for key in self._keys)

    def opened(self, reader: TicketReader, fields: Fields, kind: TicketKind) -> HandoffTicket:
        """Return the validated ticket if a fleet secret has sealed exactly this ticket, or if its host needs no seal.

        Raises:
            TicketError: `ticket-seal`, or as `TicketReader.read`.
        """
        seal = fields.get("kv_seal")
        if seal is None:
            self._require_unsealed(fields)
            return reader.ticket_of(fields, kind)
        try:
            ticket = reader.ticket_of(fields, kind)
        except TicketError as error:
            if error.code not in _MAY_BE_DOUBLES:
                raise
            ticket = reader.ticket_of(_without_doubles(fields, reader.max_blocks), kind)
        if self.covers(canonical_ticket(ticket, str(fields["remote_host"])), seal):
            return ticket
        raise TicketError(
            "ticket-seal",
            f"no fleet secret of this engine has sealed this ticket of engine {quote(ticket.peer.engine_id)}: it was changed on "
            "its way, or that engine has other secrets",
            field="kv_seal",
        )

    def _require_unsealed(self, fields: Fields) -> None:
        """Refuse a ticket without a seal unless its host lies in a network whose engines write no seals."""
        host = fields.get("remote_host")
        if self._unsealed is not None and type(host) is str:
            try:
                self._unsealed.require(host)
            except TicketError:
                pass
            else:
                return
        raise TicketError(
            "ticket-seal",
            f"the ticket for host {quote(host)} has no seal, and this engine requires one; engines of another kind must be named "
            "in its configuration",
            field="kv_seal",
        )


@final
class _Key:
    """HMAC-SHA-256 under one key, with both key blocks hashed in advance."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, secret: bytes) -> None:
        block = (sha256(secret).digest() if len(secret) > _BLOCK_BYTES else secret).ljust(_BLOCK_BYTES, b"\0")
        self._inner = sha256(bytes([byte ^ 0x36 for byte in block]))
        self._outer = sha256(bytes([byte ^ 0x5C for byte in block]))

    def mac(self, message: bytes) -> str:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.hexdigest()


def canonical_ticket(ticket: HandoffTicket, host: str = "") -> bytes:
    """Return the bytes under a ticket's seal; `host` is the ticket's own spelling of the host, if `ticket` has another.

    See the top of this module.
    """
    kind, peer, request_id, groups, tokens, lease_s, fence, nonce, prompt, spans, expiry_s, mode = ticket
    slot, word = (-1, -1) if fence is None else fence
    parts = [
        _TAG,
        _FIXED.pack(
            1 if kind == "handoff" else 2,
            peer.port,
            peer.tp,
            peer.pp,
            peer.dcp,
            -1 if peer.generation is None else peer.generation,
            -1 if peer.dialect is None else peer.dialect,
            -1 if tokens is None else tokens,
            slot,
            word,
            0 if mode is None else 1,
            -1.0 if lease_s is None else lease_s,
            -1.0 if expiry_s is None else expiry_s,
        ),
    ]
    for text in (peer.engine_id, host or peer.host, request_id, nonce):
        data = text.encode("utf-8", "surrogatepass")
        parts += _NUMBER.pack(len(data)), data
    parts += (_ABSENT,) if prompt is None else (_NUMBER.pack(len(prompt)), prompt.encode())
    parts.append(_NUMBER.pack(len(groups)))
    for ids, first_token, null in groups:
        parts += _GROUP.pack(first_token, -1 if null is None else null, len(ids)), _packed_ids(ids)
    parts.append(Struct(f"<{len(spans) + 1}q").pack(len(spans), *spans))
    return b"".join(parts)


def _packed_ids(ids: Sequence[int]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _written(params: Mapping[str, object], peer: PeerAddress) -> HandoffTicket:
    """Return the value that a reader makes of this engine's own ticket."""
    fields = cast("Mapping[str, list[list[int]] | list[int] | None]", params)
    null = cast("int | None", params.get("kv_null_block"))
    lists = cast("list[list[int]]", fields["remote_block_ids"])
    fence = cast("list[int] | None", fields.get("kv_fence"))
    return new_tuple(
        HandoffTicket,
        (
            "readback" if params["do_remote_decode"] else "handoff",
            peer,
            params["remote_request_id"],
            tuple(
                [
                    new_tuple(BlockList, (ids, first_token, null))
                    for ids, first_token in zip(lists, cast("list[int]", fields["kv_first_tokens"]), strict=True)
                ]
            ),
            params["remote_num_tokens"],
            params["kv_lease_s"],
            None if fence is None else (fence[0], fence[1]),
            params["kv_nonce"],
            params.get("kv_prompt"),
            fields["kv_span_tokens"],
            None,
            params["transfer_mode"],
        ),
    )


def _without_doubles(fields: Fields, most: int) -> Fields:
    """Return the ticket with whole numbers for doubles that hold one, such as 5600 for 5600.0; the seal decides.

    A list of more than `most` numbers stays as it is, since no reader takes it.
    """
    whole = dict(fields)
    for key in _NUMBERS.intersection(fields):
        value: object = fields[key]
        if type(value) is not list or _count(cast("list[object]", value), most) <= most:
            whole[key] = _whole(fields[key], 2)
    return whole


def _count(value: list[object], most: int) -> int:
    """Return the total number of entries of a list and its inner lists, or its own length if that is above `most`."""
    if len(value) > most:
        return len(value)
    return len(value) + sum([len(cast("list[object]", each)) for each in value if type(each) is list])


def _whole(value: object, depth: int) -> object:
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) < _MAX_EXACT else value
    if depth and type(value) is list:
        if _ONLY_INTEGERS.issuperset(map(type, cast("list[object]", value))):
            return cast("object", value)
        return [_whole(each, depth - 1) for each in cast("list[object]", value)]
    return value
