"""Panels of the Grafana dashboard as data: what each shows, in which unit, and where its bad values are explained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["ROWS", "Panel", "Query"]

OWN: Final = "vllm:kv_transfer_"
HOSTS: Final = "vllm:nixl_"
_CHOSEN: Final = '{model_name=~"$model", instance=~"$instance"}'


@dataclass(frozen=True, slots=True)
class Query:
    """Expression in PromQL and the name of its curves."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Picture of a few queries.

    Attributes:
        title: Heading.
        about: Sentence that says what a bad value looks like; shown behind the panel's info sign.
        unit: Grafana's name of the unit.
        queries: Curves, or one number for a `stat`.
        kind: `stat` is one number that is red above 0; `table` has a row per sample.
    """

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["curves", "stat", "table"] = "curves"


def _grown(name: str, *by: str) -> Query:
    """Return a counter's growth per second, by engine address and the labels given."""
    labels = ("instance", *by)
    expression = f"sum by ({', '.join(labels)}) (rate({name}{_CHOSEN}[$__rate_interval]))"
    return Query(expression, " ".join(f"{{{{{label}}}}}" for label in labels))


def _level(name: str, *by: str) -> Query:
    labels = ("instance", *by)
    return Query(f"sum by ({', '.join(labels)}) ({name}{_CHOSEN})", " ".join(f"{{{{{label}}}}}" for label in labels))


def _named(query: Query, word: str) -> Query:
    return Query(query.expression, f"{word} {query.legend}")


def _quantile(name: str, share: float, word: str = "") -> Query:
    """Return a quantile of a histogram over all engines chosen, e.g. share 0.99 for p99."""
    expression = f"histogram_quantile({share:g}, sum by (le) (rate({name}_bucket{_CHOSEN}[$__rate_interval])))"
    return Query(expression, f"{word} p{share * 100:g}".strip())


def _number(title: str, name: str, about: str) -> Panel:
    query = Query(f"sum(increase({name}{_CHOSEN}[$__range])) or vector(0)", title)
    return Panel(title, about, "short", (query,), "stat")


def _count(title: str, name: str, about: str, unit: str = "short") -> Panel:
    return Panel(title, about, unit, (Query(f"sum({name}{_CHOSEN}) or vector(0)", title),), "stat")


_GLANCE: Final = (
    _number("Failed reads", OWN + "num_failed_reads_total", "Requests whose KV was not taken over in this span."),
    _number("Leases expired unread", HOSTS + "num_kv_expired_reqs_total", "Prompts computed and never read."),
    _number("Stale KV refused", OWN + "num_fence_rejections_total", "Reads voided because their lease had ended."),
    _number("Exceptions", OWN + "num_callback_errors_total", "Not 0: a bug; the log has each kind once."),
    _count("Stuck threads", OWN + "stuck_threads", "Ranks that make no progress: restart that engine."),
    _count("In quarantine", OWN + "quarantined_bytes", "Bytes that a hanging peer might still write into.", "bytes"),
)

_HAND_OVERS: Final = (
    Panel(
        "KV read, by transport",
        "An unexpected back end, memory or ucx_tls; ucx_tls is what UCX may choose from, not what it chose.",
        "Bps",
        (_grown(OWN + "read_bytes_total", "backend", "memory", "ucx_tls"),),
    ),
    Panel(
        "Reads",
        "None on a decode engine that has load: its prompts are not handed over.",
        "cps",
        (_grown(HOSTS + "xfer_time_seconds_count"),),
    ),
    Panel(
        "Bytes per read",
        "Size of a prompt's KV.",
        "bytes",
        (_quantile(HOSTS + "bytes_transferred", 0.5), _quantile(HOSTS + "bytes_transferred", 0.99)),
    ),
    Panel(
        "Descriptors per read",
        "Few are good: neighbours are merged.",
        "short",
        (_quantile(HOSTS + "num_descriptors", 0.5), _quantile(HOSTS + "num_descriptors", 0.99)),
    ),
    Panel(
        "Where a read's time goes, p99",
        "Queue above wire: max_inflight_bytes or a slow peer holds reads back. Fence at milliseconds: no core.",
        "s",
        (
            _quantile(OWN + "queue_seconds", 0.99, "queue"),
            _quantile(HOSTS + "post_time_seconds", 0.99, "post"),
            _quantile(HOSTS + "xfer_time_seconds", 0.99, "wire"),
            _quantile(OWN + "fence_seconds", 0.99, "fence"),
        ),
    ),
    Panel(
        "Prompt tokens, by where their KV came from",
        "local_compute on a decode engine: prompts are computed again there.",
        "cps",
        (_grown("vllm:prompt_tokens_by_source_total", "source"),),
    ),
    Panel(
        "Time to first token (vLLM's)",
        "Time that a user waits; compare with the read's time beside it.",
        "s",
        (
            _quantile("vllm:time_to_first_token_seconds", 0.5),
            _quantile("vllm:time_to_first_token_seconds", 0.99),
        ),
    ),
    Panel(
        "Failed and cancelled reads, by code",
        "request-ended and blocks-leased: cancelled by this engine; any other code says why a read failed.",
        "cps",
        (_grown(OWN + "num_failed_reads_total", "code"), _grown(OWN + "num_cancelled_reads_total", "code")),
    ),
    Panel(
        "Failed transfers, as vLLM's own connector counts",
        "Reads, handshakes and notifications together.",
        "cps",
        (
            _named(_grown(HOSTS + "num_failed_transfers_total"), "all"),
            _named(_grown(HOSTS + "num_failed_notifications_total"), "notifications"),
        ),
    ),
    Panel(
        "Requests with a hand-over, by state",
        "Piling up in one state shows where it stops.",
        "short",
        (_level(OWN + "live_requests", "state"),),
    ),
)

_LEASES: Final = (
    Panel(
        "Bytes of a streamed prompt, p50",
        "Early well below the whole: prompts of few chunks, or the router asks the decode engine late.",
        "bytes",
        (
            _quantile(OWN + "stream_bytes", 0.5, "all"),
            _quantile(OWN + "stream_early_bytes", 0.5, "before the prompt's end"),
        ),
    ),
    Panel(
        "Prompts not streamed, streams broken off, by code",
        "not-streamed: one side lacks streaming. no-room: decode lacks blocks. stream-restarted: prefill preempts.",
        "cps",
        (
            _named(_grown(OWN + "num_unstreamed_prompts_total", "code"), "not streamed"),
            _named(_grown(OWN + "num_torn_streams_total", "code"), "broken off"),
        ),
    ),
    Panel(
        "Blocks kept for a reader",
        "Near the cache's size: tickets are not read.",
        "short",
        (_named(_level(OWN + "leased_blocks"), "blocks"), _named(_level(OWN + "fence_slots_used"), "fence slots")),
    ),
    Panel("Bytes kept for a reader, per rank", "As the blocks.", "bytes", (_level(OWN + "leased_bytes"),)),
    Panel(
        "Leases renewed, expired, read too late",
        "Expired: the ticket came too late, or heartbeats did. Rejected: stale KV was refused.",
        "cps",
        (
            _named(_grown(OWN + "num_lease_renewals_total"), "renewed"),
            _named(_grown(HOSTS + "num_kv_expired_reqs_total"), "expired"),
            _named(_grown(OWN + "num_revoked_leases_total"), "revoked"),
            _named(_grown(HOSTS + "num_notifications_after_expiry_total"), "completed after expiry"),
            _named(_grown(OWN + "num_fence_rejections_total"), "rejected"),
        ),
    ),
    Panel(
        "Late heartbeats, p99",
        "A lease of 30 s ends at a lag of 15 s. Delay high too: the decode engine's steps are long.",
        "s",
        (
            _quantile(OWN + "heartbeat_lag_seconds", 0.99, "lag (prefill)"),
            _quantile(OWN + "heartbeat_delay_seconds", 0.99, "delay (decode)"),
        ),
    ),
    Panel(
        "Heartbeats not sent",
        "One per new engine is normal; more: handshakes hang.",
        "cps",
        (_grown(OWN + "num_unsent_heartbeats_total"),),
    ),
    Panel(
        "Tickets withheld or refused, by code",
        "Withheld by prefill: a quota. Refused by decode: a router sends broken tickets.",
        "cps",
        (
            _named(_grown(OWN + "num_withheld_tickets_total", "code"), "withheld"),
            _named(_grown(OWN + "num_refused_tickets_total", "code"), "refused"),
        ),
    ),
)

_PEERS: Final = (
    Panel(
        "Handshakes",
        "Seconds: the peer's scheduler process is busy or far.",
        "s",
        (_quantile(OWN + "handshake_seconds", 0.5), _quantile(OWN + "handshake_seconds", 0.99)),
    ),
    Panel(
        "Peers that fail",
        "Dropped without a restart of a prefill engine: the network loses connections.",
        "cps",
        (
            _named(_grown(OWN + "num_failed_handshakes_total"), "failed handshakes"),
            _named(_grown(OWN + "num_dropped_engines_total"), "dropped engines"),
            _named(_grown(OWN + "num_retried_reads_total"), "retried reads"),
            _named(_grown(OWN + "num_stalled_reads_total"), "stalled reads"),
            _named(_grown(OWN + "num_quarantined_reads_total"), "quarantined reads"),
            _named(_grown(OWN + "num_refused_notifications_total"), "refused notifications"),
        ),
    ),
    Panel(
        "Quarantine",
        "Growing: a peer hangs.",
        "bytes",
        (_level(OWN + "quarantined_bytes"),),
    ),
    Panel(
        "Time of the engine's own thread, p99",
        "As long as steps: make the layouts equal, or leave host-buffer mode.",
        "s",
        (
            _quantile(OWN + "conversion_seconds", 0.99, "pages in order"),
            _quantile(OWN + "mirror_save_seconds", 0.99, "to the mirror"),
            _quantile(OWN + "mirror_restore_seconds", 0.99, "from the mirror"),
        ),
    ),
    Panel(
        "Copies that failed",
        "Not 0: the log has the reason.",
        "cps",
        (
            _named(_grown(OWN + "num_failed_conversions_total"), "conversions"),
            _named(_grown(OWN + "num_failed_mirror_copies_total"), "mirror"),
        ),
    ),
)

_ENGINES: Final = (
    Panel(
        "Which connector runs where",
        "Engines of one fleet that run another connector or other choices than their siblings.",
        "short",
        (Query(f"{OWN}info{_CHOSEN}", ""),),
        "table",
    ),
)

ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    ("At a glance", _GLANCE),
    ("Hand-overs", _HAND_OVERS),
    ("Leases and tickets", _LEASES),
    ("Peers", _PEERS),
    ("Engines", _ENGINES),
)
"""Rows of the dashboard, from top to bottom."""
