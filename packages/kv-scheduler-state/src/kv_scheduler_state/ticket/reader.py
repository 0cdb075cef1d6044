"""Reads a client's `kv_transfer_params` into a `HandoffTicket`, trusting nothing."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast, final

from kv_scheduler_state.config import MAX_PEER_GENERATION
from kv_scheduler_state.errors import TicketError, quote
from kv_scheduler_state.hosts import HostPolicy, canonical_host
from kv_scheduler_state.ticket.peer_blocks import PeerBlocks
from kv_scheduler_state.ticket.ticket import HandoffTicket, PeerAddress, TicketKind

if TYPE_CHECKING:
    from kv_scheduler_state.config import SchedulerConfig
    from kv_scheduler_state.values import BlockIds

__all__ = ["MAX_BLOCKS", "Fields", "ParamsKind", "TicketReader"]

ParamsKind = Literal["none", "prefill", "handoff", "readback"]
Fields = Mapping[object, Any]
"""Params that are a mapping of a permitted size whose values are not checked."""

_MAX_KEYS: Final = 64
_MAX_TEXT_CHARS: Final = 512
MAX_BLOCKS: Final = 1 << 20
"""Most block ids that a ticket may list, over all groups."""
_MAX_BLOCK_ID: Final = (1 << 32) - 1
_MAX_PARALLEL: Final = 1024
_MAX_TOKENS: Final = 1 << 31
_MAX_LEASE_S: Final = 86_400.0
_MAX_FENCE_SLOT: Final = (1 << 24) - 1
_MAX_CLOCK_S: Final = 1e15
_LISTS: Final = (list, tuple)
_MAX_PEERS: Final = 1024
_BOOLS: Final = frozenset((False, True))
_ADDRESS_KEYS: Final = (
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "pp_size",
    "dcp_size",
    "kv_generation",
    "remote_registration_generation",
    "kv_dialect",
    "transfer_mode",
)
_DIGEST: Final = re.compile(r"(?:[0-9a-f]{64})?\Z")
_NONCE: Final = re.compile(r"[0-9a-zA-Z_-]{1,64}\Z")


@final
class TicketReader:
    """Reads tickets under one engine's rules.

    Args:
        config: The engine: its groups, its null block, the hosts that it may connect to, the ids that it cannot
            notify, and whether `do_remote_decode` with blocks is a readback ticket, else a plain prefill request.
        takes_offers: Whether a ticket may list no blocks at all, as an offer's ticket does.
    """

    def __init__(self, config: SchedulerConfig, *, takes_offers: bool = False) -> None:
        self._groups = len(config.groups)
        self._hosts = HostPolicy(config.peer_networks, config.peer_ports)
        self._peer_blocks = PeerBlocks(config.groups, config.null_block)
        self._reads_back = config.bidirectional
        self._takes_offers = takes_offers
        self._reserved = config.reserved_id_prefixes
        self._peers: dict[tuple[tuple[type[object], object], ...], PeerAddress] = {}

    @property
    def hosts(self) -> HostPolicy:
        """Hosts that a ticket may name."""
        return self._hosts

    def classify(self, params: object) -> ParamsKind:
        """Return what a request's params ask for.

        Raises:
            TicketError: `ticket-not-mapping`, `ticket-too-large`, `ticket-type` or `ticket-flags`.
        """
        if params is None:
            return "none"
        fields = self._fields(params)
        reads, serves = fields.get("do_remote_prefill"), fields.get("do_remote_decode")
        for name, flag in (("do_remote_prefill", reads), ("do_remote_decode", serves)):
            if flag is not None and type(flag) is not bool:
                _refuse_type(name, flag, "true, false or null")
        if reads and serves:
            raise TicketError("ticket-flags", "do_remote_prefill and do_remote_decode are both true; set one only")
        if serves:
            return "readback" if self._reads_back and fields.get("remote_block_ids") else "prefill"
        return "handoff" if reads else "none"

    def _fields(self, params: object) -> Fields:
        # The dict test comes first because an ABC's check is slow and params are dicts.
        if not isinstance(params, dict) and not isinstance(params, Mapping):
            raise TicketError("ticket-not-mapping", f"kv_transfer_params is {quote(params)}, must be an object")
        fields = cast("Fields", params)
        if len(fields) > _MAX_KEYS:
            raise TicketError(
                "ticket-too-large",
                f"kv_transfer_params has {len(fields)} keys, at most {_MAX_KEYS} are allowed",
                keys=len(fields),
            )
        return fields

    def read(self, params: object, kind: TicketKind) -> HandoffTicket:
        """Return the validated ticket.

        Args:
            params: The object as the client sent it; never changed.
            kind: The answer of `classify`.

        Raises:
            TicketError: `ticket-not-mapping`, `ticket-too-large`, `ticket-missing`, `ticket-type`, `ticket-range`,
                `ticket-text`, `ticket-id-reserved`, `ticket-host`, `ticket-blocks`, `ticket-first-token`, `ticket-groups`,
                `ticket-empty` or `ticket-mode`.
        """
        fields = self._fields(params)
        get = fields.get
        peer = self._peer(fields)
        request_id = self._text("remote_request_id", get("remote_request_id"))
        tokens = _integer(fields, "remote_num_tokens", 0, _MAX_TOKENS)
        if self._reserved and request_id.startswith(self._reserved):
            raise TicketError(
                "ticket-id-reserved",
                f"remote_request_id {quote(request_id)} begins like a notification of another kind; its engine could never be "
                "told that the read is done",
                field="remote_request_id",
            )
        for key in fields:
            if not isinstance(key, str):
                raise TicketError("ticket-type", f"kv_transfer_params has the key {quote(key)}, which is not a string")
        fence = get("kv_fence")
        return HandoffTicket(
            kind,
            peer,
            request_id,
            self._peer_blocks.lists(fields, self._blocks(get("remote_block_ids")), peer, tokens),
            peer_tokens=tokens,
            lease_s=_seconds(fields, "kv_lease_s", _MAX_LEASE_S),
            fence=None if fence is None else self._fence(fence),
            nonce=_matching(fields, "kv_nonce", _NONCE) or "",
            prompt=_matching(fields, "kv_prompt", _DIGEST),
            span_tokens=self._peer_blocks.spans(fields),
            expiry_clock_s=_seconds(fields, "remote_blocks_expiry_time", _MAX_CLOCK_S),
            transfer_mode=None if get("transfer_mode") is None else "pull",
        )

    def _peer(self, fields: Fields) -> PeerAddress:
        # An engine writes the same into all its tickets, so its address is checked once. The types are compared, too, because
        # 1, 1.0 and True are equal.
        values: list[object] = [fields.get(name) for name in _ADDRESS_KEYS]
        key = tuple([(type(value), value) for value in values])
        try:
            known = self._peers.get(key)
        except TypeError:  # a list or an object among them: the checks say where
            return self._check_peer(fields)
        if known is None:
            known = self._check_peer(fields)
            if len(self._peers) >= _MAX_PEERS:
                self._peers.clear()
            self._peers[key] = known
        return known

    def _check_peer(self, fields: Fields) -> PeerAddress:
        mode = fields.get("transfer_mode")
        if mode is not None and mode != "pull":
            raise TicketError(
                "ticket-mode",
                f"transfer_mode of engine {quote(fields.get('remote_engine_id'))} is {quote(mode)}: it serves no reads; pair "
                "this engine with a 'pull' one",
                field="transfer_mode",
            )
        host = self._text("remote_host", fields.get("remote_host"))
        self._hosts.require(host)
        port = _integer(fields, "remote_port", 1, 65535)
        if port is None:
            _refuse_type("remote_port", None, "an integer")
        self._hosts.require_port(port)
        own = _integer(fields, "kv_generation", 0, MAX_PEER_GENERATION)
        generation = _integer(fields, "remote_registration_generation", 0, MAX_PEER_GENERATION)
        return PeerAddress(
            self._text("remote_engine_id", fields.get("remote_engine_id")),
            canonical_host(host),
            port,
            _integer(fields, "tp_size", 1, _MAX_PARALLEL) or 1,
            _integer(fields, "pp_size", 1, _MAX_PARALLEL) or 1,
            _integer(fields, "dcp_size", 1, _MAX_PARALLEL) or 1,
            generation if own is None else own,
            _integer(fields, "kv_dialect", 0, 1 << 16),
        )

    def _text(self, name: str, value: object) -> str:
        if type(value) is not str:
            _refuse_type(name, value, "a string")
        if not 0 < len(value) <= _MAX_TEXT_CHARS or not value.isprintable():
            raise TicketError(
                "ticket-text",
                f"{name} is {quote(value)} of {len(value)} characters; it must have 1 to "
                f"{_MAX_TEXT_CHARS}, all printable",
                field=name,
            )
        return value

    def _blocks(self, groups: Sequence[Sequence[int]] | None) -> BlockIds:
        if not isinstance(groups, _LISTS):
            _refuse_type("remote_block_ids", groups, "a list of lists of block ids")
        if len(groups) != self._groups:
            raise TicketError(
                "ticket-groups",
                f"remote_block_ids has {len(groups)} groups, this model has {self._groups} KV-cache groups",
                field="remote_block_ids",
                groups=len(groups),
                expected=self._groups,
            )
        budget = MAX_BLOCKS
        blocks: list[tuple[int, ...]] = []
        for group in groups:
            if not isinstance(group, _LISTS):
                _refuse_type("remote_block_ids", group, "a list of lists of block ids")
            budget -= len(group)
            if budget < 0:
                raise TicketError(
                    "ticket-too-large",
                    f"remote_block_ids has more than {MAX_BLOCKS} block ids",
                    field="remote_block_ids",
                )
            if not _are_block_ids(group):
                raise TicketError(
                    "ticket-blocks",
                    f"remote_block_ids must hold integers from 0 to {_MAX_BLOCK_ID}",
                    field="remote_block_ids",
                )
            blocks.append(tuple(group))
        if not any(blocks) and not self._takes_offers:
            raise TicketError("ticket-empty", "remote_block_ids names no block at all", field="remote_block_ids")
        return tuple(blocks)

    def _fence(self, pair: Sequence[object]) -> tuple[int, int]:
        if not isinstance(pair, _LISTS) or len(pair) != 2:
            _refuse_type("kv_fence", pair, "a pair [slot, generation]")
        slot, generation = pair
        if (
            type(slot) is not int
            or type(generation) is not int
            or not 0 <= slot <= _MAX_FENCE_SLOT
            or not 1 <= generation <= MAX_PEER_GENERATION
        ):
            raise TicketError(
                "ticket-range",
                f"kv_fence is [{quote(slot)}, {quote(generation)}]; the slot must be 0 to "
                f"{_MAX_FENCE_SLOT} and the generation 1 to 2**63 - 1",
                field="kv_fence",
            )
        return slot, generation


def _are_block_ids(group: Sequence[int]) -> bool:
    # Built-ins over the whole list: a loop over a long prompt's ids would cost more than everything else at admission.
    try:
        array("I", group)  # only integers of 32 bits without a sign get in, and bools
    except (TypeError, OverflowError):
        return False
    # A bool is equal to 0 or 1, so each id's type is checked only where one of these is among them.
    return _BOOLS.isdisjoint(group) or bool not in map(type, group)


def _matching(fields: Fields, name: str, pattern: re.Pattern[str]) -> str | None:
    value: object = fields.get(name)
    if value is None:
        return None
    if type(value) is not str:
        _refuse_type(name, value, "a string")
    if not pattern.match(value):
        raise TicketError("ticket-text", f"{name} is {quote(value)}, which no engine of this kind writes", field=name)
    return value


def _refuse_type(name: str, value: object, wanted: str) -> NoReturn:
    if value is None:
        raise TicketError("ticket-missing", f"{name} is missing; it must be {wanted}", field=name)
    raise TicketError("ticket-type", f"{name} is {quote(value)}; it must be {wanted}", field=name)


def _integer(fields: Fields, name: str, least: int, most: int) -> int | None:
    value: object = fields.get(name)
    if value is None:
        return None
    if type(value) is not int:  # a bool is an int to isinstance
        _refuse_type(name, value, "an integer")
    if not least <= value <= most:
        raise TicketError("ticket-range", f"{name} is {quote(value)}, must be {least} to {most}", field=name)
    return value


def _seconds(fields: Fields, name: str, most: float) -> float | None:
    value: object = fields.get(name)
    if value is None:
        return None
    if type(value) is not float and type(value) is not int:
        _refuse_type(name, value, "a number of seconds")
    if not 0 < value <= most:
        raise TicketError("ticket-range", f"{name} is {quote(value)}, must be above 0 and at most {most}", field=name)
    return float(value)
