"""docs/budgets.md says what the code does, and every row has its attack."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

from kv_handshake import Listener, QueryLimits, Timing
from kv_handshake.core import desk, pacing
from kv_handshake.sockets import connections as sockets
from kv_handshake.sockets import router, watch
from kv_handshake.wire import limits
from kv_scheduler_state.streams import consumer as stream_consumer
from kv_scheduler_state.ticket import early
from vllm_adapter.cache import vllm_peer
from vllm_adapter.observe import recorder

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \| `(test_\w+)` \|$", (ROOT / "docs" / "budgets.md").read_text(), re.MULTILINE
)


def test_numbers_are_those_of_the_code() -> None:
    timing = Timing()
    code = {
        "bytes of a query": limits.MAX_QUERY_BYTES,
        "bytes that a connection is ahead of its queries": watch.AHEAD_BYTES,
        "bytes that all connections are ahead of their queries": watch.AHEAD_BYTES_IN_ALL,
        "connections": watch.MOST_CONNECTIONS,
        "seconds without a query": int(watch.IDLE_S),
        "unread replies of a connection": sockets.HIGH_WATER_MARK,
        "surplus frames of a message": vars(router)["_MAX_SURPLUS_FRAMES"],
        "open asks of a connection": desk.ASKS_PER_CONNECTION,
        "open asks": desk.MOST_ASKS,
        "bytes of all open asks": desk.MOST_ASKED_BYTES,
        "seconds that an ask is open": signature(Listener.take_asks).parameters["wait_s"].default,
        "queries at once from an address": int(QueryLimits().burst),
        "bytes of a frame of a reply": limits.MAX_REPLY_BYTES,
        "bytes of all replies of a handshake": limits.MAX_HANDSHAKE_BYTES,
        "values in the geometry documents of a peer": vars(vllm_peer)["_MOST_VALUES"],
        "bytes of an envelope without its metadata": limits.MAX_ENVELOPE_BYTES,
        "entries of a list": limits.MAX_REGIONS,
        "bytes of a list": limits.MAX_LIST_BYTES,
        "factors": limits.MAX_FACTORS,
        "lists and maps within a factor": limits.MAX_DEPTH,
        "ranks of a handshake": limits.MAX_RANKS,
        "connections at once": timing.connections,
        "keys of `kv_stream`": vars(early)["_MOST_KEYS"],
        "requests with an early ticket that wait or are read at once": vars(stream_consumer)["_MOST_STREAMS"],
        "failed places of early tickets that are remembered": pacing.MOST_FAILURES,
        "requests that a heartbeat names": limits.MAX_HEARTBEAT_IDS,
        "bytes of a notification": limits.MAX_NOTIFICATION_BYTES,
        "characters of a client's or peer's text in a log line": vars(recorder)["_MOST_CHARS"],
    }
    page = {name: int(re.match(r"\d+", value)[0]) for name, value, _ in ROWS if re.match(r"\d+", value)}  # type: ignore[index]
    assert {name: page[name] for name in code} == code
    assert page["bytes of a frame"] == vars(router)["_MAX_INCOMING_BYTES"]
