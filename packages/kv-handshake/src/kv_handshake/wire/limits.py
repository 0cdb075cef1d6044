"""Upper bounds on everything that a peer can make large."""

from __future__ import annotations

import msgspec

__all__ = [
    "DECODE_ERRORS",
    "MAX_ASK_BYTES",
    "MAX_ASK_REPLY_BYTES",
    "MAX_DEPTH",
    "MAX_ENGINE_ID_CHARS",
    "MAX_ENVELOPE_BYTES",
    "MAX_FACTORS",
    "MAX_HANDSHAKE_BYTES",
    "MAX_HEARTBEAT_IDS",
    "MAX_LIST_BYTES",
    "MAX_NOTIFICATION_BYTES",
    "MAX_QUERY_BYTES",
    "MAX_RANK",
    "MAX_RANKS",
    "MAX_READER_COUNT",
    "MAX_REGIONS",
    "MAX_REPLY_BYTES",
    "MAX_REQUEST_ID_BYTES",
    "NUMBER_END",
]

MAX_QUERY_BYTES = 256
"""A metadata query takes 16 to 32 bytes, whichever integer widths the sender picks."""

MAX_ASK_BYTES = 4096
"""Bytes of an ask's payload; a question of a streamed hand-over takes some 300."""

MAX_ASK_REPLY_BYTES = 1024 * 1024
"""Bytes of an answer's payload: a ticket of 200 000 block ids."""

MAX_REPLY_BYTES = 4 * 1024 * 1024
"""Bytes of a rank's envelope. A thousand regions and a dozen network rails stay below a tenth of this."""

MAX_HANDSHAKE_BYTES = 64 * 1024 * 1024
"""Bytes of all envelopes of a handshake, which are kept until its last rank has answered: 200 ranks of 300 kB take 60 MB."""

MAX_REGIONS = 16_384
"""Entries of each list in the agent metadata."""

MAX_LIST_BYTES = 512 * 1024
"""Bytes of each list in the agent metadata, before it is opened: 16 384 names of 30 characters. It is opened in 0.1 s at most."""

MAX_DEPTH = 8
"""Lists and maps within each other in a factor; a KV-cache group of vLLM has 3."""

MAX_RANKS = 4096
"""Ranks that one handshake asks for."""

MAX_ENVELOPE_BYTES = 256 * 1024
"""An envelope without its metadata bytes: the hash and the factors. The factors of a model of 1000 layers take 50 kB."""

MAX_RANK = 65_535
"""Largest pp or tp rank; far above any engine, small enough for every integer type of a port to another language."""

MAX_READER_COUNT = 65_536
"""Consumer ranks that may read one request from one producer rank."""

MAX_ENGINE_ID_CHARS = 512
MAX_FACTORS = 256
MAX_REQUEST_ID_BYTES = 4096
MAX_NOTIFICATION_BYTES = 1024 * 1024
MAX_HEARTBEAT_IDS = 8192
"""Requests that one heartbeat keeps alive: vLLM sends those of all reads at a peer in one. They are read in 10 ms.

Further ids of a longer heartbeat are only counted; the next heartbeat may name them."""

NUMBER_END = 1 << 53
"""Numbers that travel through JSON stay below this: many readers keep them as 64-bit floats, which are exact up to here."""


DECODE_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""msgspec's own errors; bad UTF-8 (a ValueError); map keys without a hash (a TypeError in older releases); nesting that
exceeds the interpreter's limit. Lengths that promise more than the frame holds are refused by msgspec before anything is
allocated."""
