"""Reads a client's `kv_transfer_params` into a `HandoffTicket`, trusting nothing.

Block lists. Tickets of this project carry the first token of each (`kv_first_tokens`). vLLM's own connector, and version 0.1 of
this project, only send ids, under fixed rules: a group that keeps the whole prompt is sent whole; a window group is cut to its
last `window_blocks` blocks; of a state group the running state is sent, by older versions with the scratch blocks behind it. A
list as long as a whole list beside it was not cut and begins with token 0. The first token of a cut one follows from the whole
list and from the size of the peer's blocks, which such a ticket does not tell. So blocks of our size must make lists of just
these lengths from the tokens that the peer has computed; the worker, which learns the true size at the handshake, refuses the
ticket if it is another one after all. The same holds for a list with null blocks at its front.

Example: blocks of 16 tokens, a window of 32 (`window_blocks` 3). A ticket of 160 tokens with a whole list of 10 blocks and a
window list of 3: it begins with token (10 - 3) * 16 = 112. A peer with blocks of 32 lists 5 and 2 for the same tokens; its window
list begins with token 96, but 5 is not 160 / 16, so the ticket is refused. With no whole list beside it a list is refused, too,
unless the window covers all tokens: counting from the end of the prompt would be a guess.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast, final

from kv_scheduler_state.config import MAX_PEER_GENERATION
from kv_scheduler_state.errors import TicketError, field_error, quote
from kv_scheduler_state.hosts import HostPolicy, canonical_host
from kv_scheduler_state.ticket.ticket import WHOLE_NUMBERS, HandoffTicket, PeerAddress, TicketKind
from kv_scheduler_state.values import BlockList, running_state

if TYPE_CHECKING:
    from kv_scheduler_state.config import GroupConfig, SchedulerConfig
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
    *("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "dcp_size"),
    *("kv_generation", "remote_registration_generation", "kv_dialect", "transfer_mode"),
)
_KEYS: Final = WHOLE_NUMBERS.union(
    ("do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_host", "transfer_mode"),
    ("remote_blocks_expiry_time", "kv_lease_s", "kv_nonce", "kv_prompt", "kv_media", "kv_seal", "kv_stream"),
)
_KNOWN: Final = _KEYS.union(
    ("remote_prefill_cached_tokens", "remote_hosts"),
    ("cp_size", "dp_size", "ep_size", "etp_size", "mp_size", "pcp_size", "ptp_size", "sp_size", "vpp_size"),
)
"""`_KEYS`, the key that vLLM adds to every ticket, and those of other hosts that only look like one of ours misspelt. Source of
`remote_hosts`: vLLM's MoRIIO."""
_DIGEST: Final = re.compile(r"(?:[0-9a-f]{64})?\Z")
_NONCE: Final = re.compile(r"[0-9a-zA-Z_-]{1,64}\Z")


@final
class TicketReader:
    """Reads tickets under one engine's rules.

    Args:
        config: The engine: its groups, its null block, the hosts that it may connect to, the ids that it cannot
            notify, and whether `do_remote_decode` with blocks is a readback ticket, else a plain prefill request.
        takes_offers: Whether a ticket may list no blocks at all, as an offer's ticket does.

    Attributes:
        hosts: Hosts that a ticket may name.
    """

    def __init__(self, config: SchedulerConfig, *, takes_offers: bool = False) -> None:
        # The peer's groups match these in kind, and vLLM's own peers use the same null block.
        self._groups = config.groups
        self._null = config.null_block
        self.hosts = HostPolicy(config.peer_networks, config.peer_ports)
        self._reads_back = config.bidirectional
        self._takes_offers = takes_offers
        self._reserved = config.reserved_id_prefixes
        self._peers: dict[tuple[object, ...], PeerAddress] = {}

    def classify(self, params: object) -> ParamsKind:
        """Return what a request's params ask for.

        Raises:
            TicketError: `ticket-not-mapping`, `ticket-too-large`, `ticket-key`, `ticket-type` or `ticket-flags`.
        """
        if params is None:
            return "none"
        # The dict test comes first because an ABC's check is slow and params are dicts.
        if not isinstance(params, dict) and not isinstance(params, Mapping):
            raise TicketError("ticket-not-mapping", f"kv_transfer_params is {quote(params)}, must be an object")
        fields = cast("Fields", params)
        if len(fields) > _MAX_KEYS:
            problem = f"has {len(fields)} keys, at most {_MAX_KEYS} are allowed"
            raise field_error("ticket-too-large", "kv_transfer_params", problem)
        if not _KNOWN.issuperset(fields):
            _refuse_misspelt(fields)
        reads, serves = fields.get("do_remote_prefill"), fields.get("do_remote_decode")
        for name, flag in (("do_remote_prefill", reads), ("do_remote_decode", serves)):
            if flag is not None and type(flag) is not bool:
                _refuse_type(name, flag, "true, false or null")
        if reads and serves:
            raise TicketError("ticket-flags", "do_remote_prefill and do_remote_decode are both true; set one only")
        if serves:
            return "readback" if self._reads_back and fields.get("remote_block_ids") else "prefill"
        return "handoff" if reads else "none"

    def read(self, params: object, kind: TicketKind) -> HandoffTicket:
        """Return the validated ticket.

        Args:
            params: The object as the client sent it; never changed.
            kind: The answer of `classify` to it.

        Raises:
            TicketError: `ticket-too-large`, `ticket-missing`, `ticket-type`, `ticket-range`,
                `ticket-text`, `ticket-id-reserved`, `ticket-host`, `ticket-blocks`, `ticket-first-token`, `ticket-groups`,
                `ticket-empty` or `ticket-mode`.
        """
        fields = cast("Fields", params)
        get = fields.get
        peer = self._peer(fields)
        request_id = self._text("remote_request_id", get("remote_request_id"))
        tokens = _integer(fields, "remote_num_tokens", 0, _MAX_TOKENS)
        if self._reserved and request_id.startswith(self._reserved):
            problem = f"{quote(request_id)} begins like a notification of another kind, so no reader could name it"
            raise field_error("ticket-id-reserved", "remote_request_id", problem)
        odd = [key for key in fields if type(key) is not str]
        if odd:
            raise TicketError("ticket-type", f"kv_transfer_params has the key {quote(odd[0])}, which is not a string")
        pair: Sequence[object] | None = get("kv_fence")
        fence: tuple[int, int] | None = None
        if pair is not None:
            if not isinstance(pair, _LISTS) or len(pair) != 2:
                _refuse_type("kv_fence", pair, "a pair [slot, generation]")
            slot, generation = pair
            if (
                type(slot) is not int
                or type(generation) is not int
                or not 0 <= slot <= _MAX_FENCE_SLOT
                or not 1 <= generation <= MAX_PEER_GENERATION
            ):
                limits = f"the slot must be 0 to {_MAX_FENCE_SLOT} and the generation 1 to 2**63 - 1"
                raise field_error("ticket-range", "kv_fence", f"is [{quote(slot)}, {quote(generation)}]; {limits}")
            fence = slot, generation
        return HandoffTicket(
            kind,
            peer,
            request_id,
            self._lists(fields, self._blocks(get("remote_block_ids")), peer.dcp, tokens),
            tokens,
            _seconds(fields, "kv_lease_s", _MAX_LEASE_S),
            fence,
            _matching(fields, "kv_nonce", _NONCE) or "",
            _matching(fields, "kv_prompt", _DIGEST),
            self._per_group(fields, "kv_span_tokens", 1) or (),
            _seconds(fields, "remote_blocks_expiry_time", _MAX_CLOCK_S),
            None if get("transfer_mode") is None else "pull",
        )

    def _peer(self, fields: Fields) -> PeerAddress:
        # An engine writes the same into all its tickets, so its address is checked once. The types are compared, too, because
        # 1, 1.0 and True are equal.
        values = tuple(map(fields.get, _ADDRESS_KEYS))
        key = (*values, *map(type, values))
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
            engine = quote(fields.get("remote_engine_id"))
            problem = f"of engine {engine} is {quote(mode)}: it serves no reads; pair this engine with a 'pull' one"
            raise field_error("ticket-mode", "transfer_mode", problem)
        host = self._text("remote_host", fields.get("remote_host"))
        self.hosts.require(host)
        port = _integer(fields, "remote_port", 1, 65535)
        if port is None:
            _refuse_type("remote_port", None, "an integer")
        self.hosts.require_port(port)
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
            problem = (
                f"is {quote(value)} of {len(value)} characters; it must have 1 to {_MAX_TEXT_CHARS}, all printable"
            )
            raise field_error("ticket-text", name, problem)
        return value

    def _blocks(self, groups: Sequence[Sequence[int]] | None) -> BlockIds:
        if not isinstance(groups, _LISTS):
            _refuse_type("remote_block_ids", groups, "a list of lists of block ids")
        if len(groups) != len(self._groups):
            problem = f"has {len(groups)} groups, this model has {len(self._groups)} KV-cache groups"
            raise field_error("ticket-groups", "remote_block_ids", problem)
        budget = MAX_BLOCKS
        blocks: list[tuple[int, ...]] = []
        for group in groups:
            if not isinstance(group, _LISTS):
                _refuse_type("remote_block_ids", group, "a list of lists of block ids")
            budget -= len(group)
            if budget < 0:
                raise field_error("ticket-too-large", "remote_block_ids", f"has more than {MAX_BLOCKS} block ids")
            # Built-ins over the whole list: a loop over a long prompt's ids would cost more than all else at admission.
            try:
                array("I", group)  # only integers of 32 bits without a sign get in, and bools
                # A bool is equal to 0 or 1, so each id's type is checked only where one of these is among them.
                is_good = _BOOLS.isdisjoint(group) or bool not in map(type, group)
            except (TypeError, OverflowError):
                is_good = False
            if not is_good:
                problem = f"must hold integers from 0 to {_MAX_BLOCK_ID}"
                raise field_error("ticket-blocks", "remote_block_ids", problem)
            blocks.append(tuple(group))
        if not any(blocks) and not self._takes_offers:
            raise field_error("ticket-empty", "remote_block_ids", "names no block at all")
        return tuple(blocks)

    def _lists(self, fields: Fields, ids: BlockIds, dcp: int, tokens: int | None) -> tuple[BlockList, ...]:
        """Return one block list per group, of the ids and of the tokens that the peer has computed.

        Raises:
            TicketError: `ticket-first-token`, `ticket-blocks`, `ticket-type`.
        """
        first, null = self._per_group(fields, "kv_first_tokens", 0), self._null
        # A writer of first tokens sends the running state of a state group alone; older ones send scratch blocks behind it.
        is_cut = first is not None
        if first is None:
            first = tuple([self._first_token(number, ids, dcp, tokens) for number in range(len(ids))])
        else:
            null = fields.get("kv_null_block")
            if null is not None and not (type(null) is int and 0 <= null <= _MAX_BLOCK_ID):
                raise field_error("ticket-blocks", "kv_null_block", f"is {quote(null)}, must be a block id")
        lists: list[BlockList] = []
        for group, own, at in zip(self._groups, ids, first, strict=True):
            blocks = own
            if group.kind == "state":
                if len(own) > 1 and is_cut:
                    problem = f"lists {len(own)} blocks for a state group, which has one running state"
                    raise field_error("ticket-blocks", "remote_block_ids", problem)
                blocks = running_state(group.scratch_blocks, own)
            lists.append(BlockList(blocks, at, null))
        return tuple(lists)

    def _first_token(self, number: int, ids: BlockIds, dcp: int, tokens: int | None) -> int:
        group, own = self._groups[number], ids[number]
        count = len(own)
        if not group.sees_a_part or not count:
            return 0
        whole = next(
            (
                len(other_ids)
                for other, other_ids in zip(self._groups, ids, strict=True)
                if other.kind == "full" and other.block_tokens == group.block_tokens
            ),
            None,
        )
        if own[0] != self._null:
            is_short = tokens is not None and tokens <= group.window_tokens
            if count == whole or (whole is None and is_short):
                return 0
        if whole is not None and tokens is not None and _may_be_our_blocks(group, dcp, tokens, whole, count):
            return (whole - count) * group.block_tokens * dcp
        raise field_error(
            "ticket-first-token",
            "remote_block_ids",
            f"lists {count} blocks for the window group {number}, and nothing says where in the prompt they begin: the ticket "
            f"has no kv_first_tokens, and blocks of {group.block_tokens} tokens do not make these of its {tokens} tokens, with "
            f"{whole} blocks of a whole group",
        )

    def _per_group(self, fields: Fields, name: str, least: int) -> tuple[int, ...] | None:
        value: object = fields.get(name)
        if value is None:
            return None
        if not isinstance(value, _LISTS):
            raise field_error("ticket-type", name, f"is {quote(value)}; it must be a list of integers")
        numbers = cast("list[int]", value)
        is_good = len(numbers) == len(self._groups) and all(
            type(number) is int and least <= number <= _MAX_TOKENS for number in numbers
        )
        if not is_good:
            problem = f"must hold one integer from {least} to {_MAX_TOKENS} for each of {len(self._groups)} groups"
            raise field_error("ticket-first-token", name, problem)
        return tuple(numbers)


def _may_be_our_blocks(group: GroupConfig, dcp: int, tokens: int, whole: int, count: int) -> bool:
    """Return whether blocks of our size make these lists of so many tokens.

    Example: 250 tokens, a window of 64, blocks of 64: a whole list of 4 and a window list of 2. Blocks of 80 make the same two.

    Args:
        group: The group with a window, or chunks, which vLLM does not cut.
        dcp: Context ranks that share a block of the peer's.
        tokens: Tokens that the peer has computed.
        whole: Blocks in its whole list.
        count: Blocks in its list of this group.
    """
    span = group.block_tokens * dcp
    kept = -(-group.window_tokens // span) + 1 if group.window_tokens else whole
    return whole == -(-tokens // span) and count == min(whole, kept)


def _refuse_misspelt(fields: Fields) -> None:
    """Refuse a key that is a single edit away from a known one.

    Other unknown keys pass: they belong to the host, a router, another connector or a later release. A ticket whose
    `do_remote_decode` is misspelt would otherwise be a request without one, computed twice and never explained.
    """
    for key in [key for key in fields if type(key) is str and key not in _KNOWN]:
        plain = key.lower().replace("-", "_")
        meant = sorted(known for known in _KEYS if _is_one_edit(plain, known))
        if meant:
            problem = f"kv_transfer_params has the unknown key {quote(key)}; '{meant[0]}' may be meant"
            raise TicketError("ticket-key", problem, field=quote(key))


def _is_one_edit(key: str, known: str) -> bool:
    """Whether one letter less, more, other or swapped with the next one makes `known` of a key; also if they are equal."""
    at = next(
        (at for at, (one, other) in enumerate(zip(key, known, strict=False)) if one != other), min(len(key), len(known))
    )
    one, other = key[at:], known[at:]
    return other in (one[1:], one[1::-1] + one[2:]) or one == other[1:] or one[1:] == other[1:]


def _matching(fields: Fields, name: str, pattern: re.Pattern[str]) -> str | None:
    value: object = fields.get(name)
    if value is None:
        return None
    if type(value) is not str:
        _refuse_type(name, value, "a string")
    if not pattern.match(value):
        raise field_error("ticket-text", name, f"is {quote(value)}, which no engine of this kind writes")
    return value


def _refuse_type(name: str, value: object, wanted: str) -> NoReturn:
    if value is None:
        raise field_error("ticket-missing", name, f"is missing; it must be {wanted}")
    raise field_error("ticket-type", name, f"is {quote(value)}; it must be {wanted}")


def _integer(fields: Fields, name: str, least: int, most: int) -> int | None:
    value: object = fields.get(name)
    if value is None:
        return None
    if type(value) is not int:  # a bool is an int to isinstance
        _refuse_type(name, value, "an integer")
    if not least <= value <= most:
        raise field_error("ticket-range", name, f"is {quote(value)}, must be {least} to {most}")
    return value


def _seconds(fields: Fields, name: str, most: float) -> float | None:
    value: object = fields.get(name)
    if value is None:
        return None
    if type(value) is not float and type(value) is not int:
        _refuse_type(name, value, "a number of seconds")
    if not 0 < value <= most:
        raise field_error("ticket-range", name, f"is {quote(value)}, must be above 0 and at most {most}")
    return float(value)
