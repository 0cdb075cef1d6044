"""docs/budgets.md says what the code does, and every row has its attack."""

from __future__ import annotations

import re
from pathlib import Path

from kv_handshake import QueryLimits, Timing
from kv_handshake.core import pacing
from kv_handshake.sockets import connections as sockets
from kv_handshake.sockets import router
from kv_handshake.sockets.watch import ConnectionLimits
from kv_handshake.core.desk import AskLimits
from kv_handshake.wire import limits
from kv_scheduler_state.streams import consumer as stream_consumer
from kv_scheduler_state.ticket import early
from vllm_adapter.observe import cause_log
from vllm_adapter.worker.transfer import planner

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \| `(test_\w+)` \|$", (ROOT / "docs" / "budgets.md").read_text(), re.MULTILINE
)


def test_numbers_are_those_of_the_code() -> None:
    connections, timing, asks = ConnectionLimits(), Timing(), AskLimits()
    code = {
        "bytes of a query": limits.MAX_QUERY_BYTES,
        "bytes that a connection is ahead of its queries": connections.ahead_bytes,
        "bytes that all connections are ahead of their queries": connections.ahead_bytes_in_all,
        "connections": connections.connections,
        "seconds without a query": int(connections.idle_s),
        "unread replies of a connection": sockets.HIGH_WATER_MARK,
        "surplus frames of a message": vars(router)["_MAX_SURPLUS_FRAMES"],
        "open asks of a connection": asks.per_connection,
        "open asks": asks.in_all,
        "bytes of all open asks": asks.bytes_in_all,
        "seconds that an ask is open": int(asks.wait_s),
        "queries at once from an address": int(QueryLimits().burst),
        "bytes of a frame of a reply": limits.MAX_REPLY_BYTES,
        "bytes of all replies of a handshake": limits.MAX_HANDSHAKE_BYTES,
        "values in the geometry documents of a peer": vars(planner)["_MOST_VALUES"],
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
        "characters of a client's or peer's text in a log line": vars(cause_log)["_MOST_CHARS"],
    }
    page = {name: int(re.match(r"\d+", value)[0]) for name, value, _ in ROWS if re.match(r"\d+", value)}  # type: ignore[index]
    assert {name: page[name] for name in code} == code
    assert page["bytes of a frame"] == vars(router)["_MAX_INCOMING_BYTES"]
