"""The ticket of a hand-over: the value of `kv_transfer_params`.

The router carries this object from one engine to the other, and any client can write it. It is read once, at
admission, into a frozen value; a fault in it has a code and turns into a local prefill, never into an exception in an
engine hook. Names on the wire are vLLM's; those that begin with `kv_` are this project's and are ignored by others.
"""

from __future__ import annotations

from hashlib import sha256
from struct import Struct
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, final

if TYPE_CHECKING:
    from kv_scheduler_state.values import BlockList


__all__ = [
    "HandoffTicket",
    "PeerAddress",
    "TicketKind",
    "WHOLE_NUMBERS",
    "encode",
    "params_template",
    "wire_id",
]

TicketKind = Literal["handoff", "readback"]

_SHORT: Final = "kv-id-"
_MOST_CHARS: Final = 512
"""Longest request id that readers accept, see `TicketReader`."""


def wire_id(request_id: str) -> str:
    """Return the id under which peers know a request: its own, or a short digest of one that not every reader accepts.

    Clients choose request ids, so they may be long, not printable or in any script.
    """
    is_plain = request_id.isascii() and len(request_id) <= _MOST_CHARS and request_id.isprintable()
    # An id that looks like a digest is replaced, too, so that it is never taken for that of another request.
    if is_plain and not request_id.startswith(_SHORT):
        return request_id
    return _SHORT + sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@final
class PeerAddress(NamedTuple):
    """The engine that wrote a ticket; the same in all its tickets.

    Attributes:
        engine_id: Its name (`remote_engine_id`).
        host: Address of its side channel (`remote_host`); an IP address always in the same spelling.
        port: Port of its side channel (`remote_port`).
        tp: Its tensor-parallel size (`tp_size`, 1 if absent).
        pp: Its pipeline-parallel size (`pp_size`, 1 if absent).
        dcp: Its decode-context-parallel size (`dcp_size`, 1 if absent).
        generation: Generation of its memory registration (`kv_generation`, or vLLM's own counter of that kind,
            `remote_registration_generation`), or None.
        dialect: Connector version that it speaks (`kv_dialect`), or None.
    """

    engine_id: str
    host: str
    port: int
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    generation: int | None = None
    dialect: int | None = None


@final
class HandoffTicket(NamedTuple):
    """A validated promise of one engine to serve one request's blocks.

    The seal (`kv_seal`) is not part of it: the seal is verified over this value, and a changed value must be sealed anew. Nor is
    `kv_media`, which only says what a reader needs to compute the prompt itself.

    Attributes:
        kind: "handoff": a prefill's blocks for the decode (`do_remote_prefill`). "readback": a decode's blocks for the
            next turn's prefill (`do_remote_decode` with blocks).
        peer: Engine that holds the blocks.
        peer_request_id: The request's id there (`remote_request_id`).
        peer_blocks: Blocks per KV-cache group (`remote_block_ids`, `kv_first_tokens`, `kv_null_block`).
        peer_tokens: Tokens that the blocks hold (`remote_num_tokens`), or None if the peer did not say.
        lease_s: Length of the lease (`kv_lease_s`), or None.
        fence: (slot, generation) of the fence word (`kv_fence`), or None.
        nonce: Nonce of the grant (`kv_nonce`); empty if the peer gave none.
        prompt: Digest of the prompt (`kv_prompt`), None if the peer gave none, empty if it could not identify the prompt.
        span_tokens: Tokens per block and group (`kv_span_tokens`); empty if the peer did not say.
        expiry_clock_s: vLLM's `remote_blocks_expiry_time`, a reading of the *peer's* clock; kept, never compared here.
        transfer_mode: "pull", or None if the peer did not say.
    """

    kind: TicketKind
    peer: PeerAddress
    peer_request_id: str
    peer_blocks: tuple[BlockList, ...]
    peer_tokens: int | None = None
    lease_s: float | None = None
    fence: tuple[int, int] | None = None
    nonce: str = ""
    prompt: str | None = None
    span_tokens: tuple[int, ...] = ()
    expiry_clock_s: float | None = None
    transfer_mode: Literal["pull"] | None = None


_FIRST_WITH_GENERATION: Final = 15
"""Connector version whose tickets name a registration generation. Source: vLLM 0.33."""


WHOLE_NUMBERS: Final = frozenset(
    (
        "remote_block_ids",
        "remote_port",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_registration_generation",
        "kv_fence",
        "kv_generation",
        "kv_dialect",
        "kv_first_tokens",
        "kv_span_tokens",
        "kv_null_block",
    )
)
"""Keys that hold whole numbers, or lists of them, which a router may have kept as doubles."""


def params_template(kind: TicketKind, peer: PeerAddress, lease_s: float, null_block: int | None) -> dict[str, object]:
    """Return the part of `kv_transfer_params` that is the same in all tickets of one kind of this engine, `peer`."""
    params: dict[str, object] = {
        "do_remote_prefill": kind == "handoff",
        "do_remote_decode": kind == "readback",
        "remote_engine_id": peer.engine_id,
        "remote_host": peer.host,
        "remote_port": peer.port,
        "tp_size": peer.tp,
        "dcp_size": peer.dcp,
        "pp_size": peer.pp,
        # A clock reading would mean nothing to the peer; the lease's length travels in kv_lease_s.
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "kv_lease_s": lease_s,
    }
    if peer.generation is not None:
        params["kv_generation"] = peer.generation
        if (peer.dialect or 0) >= _FIRST_WITH_GENERATION:
            params["remote_registration_generation"] = peer.generation
    if peer.dialect is not None:
        params["kv_dialect"] = peer.dialect
    if null_block is not None:
        params["kv_null_block"] = null_block
    return params


_INTEGER: Final = Struct("<q")
_SECONDS: Final = Struct("<d")


def encode(tag: str, *fields: float | str | bytes | None) -> bytes:
    """Return a tag, one zero byte, and the fields.

    An integer takes 8 bytes, signed, little-endian; a float, an IEEE 754 double, little-endian; a text, its length in bytes as
    an integer, then UTF-8; None is the integer -1, and so is an absent text's length; bytes are taken as they are.
    """
    parts = [tag.encode(), b"\0"]
    for field in fields:
        if field is None:
            parts.append(_INTEGER.pack(-1))
        elif isinstance(field, str):
            data = field.encode("utf-8", "surrogatepass")
            parts += _INTEGER.pack(len(data)), data
        elif isinstance(field, bytes):
            parts.append(field)
        elif isinstance(field, int):
            parts.append(_INTEGER.pack(field))
        else:
            parts.append(_SECONDS.pack(field))
    return b"".join(parts)
