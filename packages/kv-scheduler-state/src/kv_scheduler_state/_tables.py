"""The three machines of a hand-over.

Theory of operation. A request has up to two records in a scheduler process: a *producer* record if a peer is to read its
blocks, and a *consumer* record if its prompt is to be read from a peer. A first-turn prefill has only the former, a decode
only the latter; with readback a request has both. The third machine, the *lease*, runs once per worker of the producer and
decides until when a reader may count on the blocks.

The engine's own rules shape the tables. A request that was parked for a read must be reported by the workers once,
even if it was aborted meanwhile, because the engine keeps its blocks until then: hence `draining`. A request that
needs no read is never reported: hence `hit` orders a notification and is done. A lease, once granted, belongs to the
workers, and the scheduler only learns its end: hence `leased` has no way out but `sent`.
"""

from __future__ import annotations

from typing import Final

from kv_scheduler_state._machine import GONE, NEW, Table, Transition

__all__ = ["CONSUMER_TABLE", "LEASE_TABLE", "PRODUCER_TABLE"]

_T = Transition

PRODUCER_TABLE: Final = Table(
    "producer",
    (
        _T(NEW, "arrive", "waiting", (), "The prompt is queued; nobody can read it yet."),
        _T("waiting", "allocate", "prefilling", ("announce",), "Workers learn the id and the fence before any reader."),
        _T("waiting", "drop", GONE, (), "Aborted or failed before the workers heard of it."),
        _T("prefilling", "allocate", "prefilling", (), "Engines may allocate a second time."),
        _T("prefilling", "chunk", "prefilling", ("save",), "A part of the prompt runs in this step."),
        _T("prefilling", "last-chunk", "prefilled", ("save", "complete"), "The rest of the prompt runs in this step."),
        _T("prefilling", "preempt", "preempted", ("forget-saves",), "Its blocks were taken; nothing of them counts."),
        _T("prefilling", "hand-over", "leased", ("grant",), "Finished by length or stop: the lease starts."),
        _T("prefilling", "drop", GONE, ("withdraw",), "Aborted or failed: the workers forget it."),
        _T("prefilled", "allocate", "prefilled", (), "Engines may allocate a second time."),
        _T("prefilled", "last-chunk", "prefilled", (), "Steps of a longer answer: the prompt is what is handed over."),
        _T("prefilled", "preempt", "preempted", ("forget-saves",), "Its blocks were taken; nothing of them counts."),
        _T("prefilled", "hand-over", "leased", ("grant",), "Finished by length or stop: the lease starts."),
        _T("prefilled", "drop", GONE, ("withdraw",), "Aborted or failed: the workers forget it."),
        _T("preempted", "allocate", "prefilling", ("restart",), "It starts again, under the same id and a new fence."),
        _T("preempted", "drop", GONE, ("withdraw",), "Aborted while waiting to start again."),
        _T("leased", "revoke", "revoked", ("order-revoke",), "Taken back by the scheduler: the workers end it early."),
        _T("leased", "sent", GONE, ("return-slot",), "Every worker's lease ended; the engine frees the blocks."),
        _T("revoked", "sent", GONE, ("return-slot",), "Every worker's lease ended; the engine frees the blocks."),
    ),
)

CONSUMER_TABLE: Final = Table(
    "consumer",
    (
        _T(NEW, "arrive", "queued", ("start-heartbeat",), "The peer keeps the blocks while the request waits."),
        _T("queued", "load", "reading", ("order-read",), "Blocks are allocated; the engine parks the request."),
        _T(
            "queued", "hit", "local", ("order-notify", "stop-heartbeat"), "Nothing is left to read: only tell the peer."
        ),
        _T(
            "queued",
            "hit-shared",
            "local",
            ("stop-heartbeat",),
            "Another request has read or will read the same ticket.",
        ),
        _T(
            "queued", "finish", GONE, ("order-notify", "stop-heartbeat"), "Ended before allocation: only tell the peer."
        ),
        _T(
            "queued",
            "finish-shared",
            GONE,
            ("stop-heartbeat",),
            "Another request has read or will read the same ticket.",
        ),
        _T("reading", "done", "local", ("end-read", "stop-heartbeat"), "The data is here and its fence was verified."),
        _T(
            "reading",
            "broken",
            "local",
            ("end-read", "stop-heartbeat"),
            "The read failed; the prompt is computed here.",
        ),
        _T(
            "reading",
            "broken-for-good",
            "failed",
            ("end-read", "stop-heartbeat"),
            "The read failed and the policy is to fail.",
        ),
        _T(
            "reading",
            "finish",
            "draining",
            ("cancel-read", "stop-heartbeat"),
            "The blocks stay until the read is quiet.",
        ),
        _T(
            "reading",
            "finish-shared",
            "draining",
            ("pass-read", "stop-heartbeat"),
            "Another request holds the same ticket: it reads once this read is quiet.",
        ),
        _T("draining", "done", GONE, ("end-read",), "The engine frees the blocks; the peer's lease has ended."),
        _T("draining", "broken", GONE, ("end-passed-read",), "The engine frees the blocks."),
        _T("draining", "broken-for-good", GONE, ("end-passed-read",), "The engine frees the blocks."),
        _T("local", "hit", "local", (), "The engine allocates the rest after the read, or after a preemption."),
        _T("local", "preempt", "local", (), "It is computed again from the local prefix."),
        _T("local", "finish", GONE, (), "The request ends like any other."),
        _T("failed", "hit", "local", (), "The engine's policy is another than this one: the prompt is computed here."),
        _T("failed", "finish", GONE, (), "The engine reports the failure to the client."),
    ),
)

LEASE_TABLE: Final = Table(
    "lease",
    (
        _T(NEW, "expect", "expected", (), "The scheduler allocated the prompt; readers may be faster than the grant."),
        _T(NEW, "grant", "granted", ("start",), "A grant whose announcement was not used."),
        _T(NEW, "release", GONE, (), "A withdrawal whose announcement was not used, or that crossed with the end."),
        _T("expected", "grant", "granted", ("start",), "The lease runs from here, on this worker's clock."),
        _T("expected", "grant-complete", GONE, ("end-read",), "All readers were faster than the grant."),
        _T("expected", "renew", "expected", (), "There is nothing to prolong yet; it counts as no renewal."),
        _T("expected", "reader", "expected", ("count",), "A reader was faster than the grant; it counts."),
        _T("expected", "release", GONE, ("end-released",), "No hand-over after all; nobody holds a ticket."),
        _T("granted", "renew", "granted", ("extend",), "A heartbeat: the later of both deadlines holds."),
        _T("granted", "reader", "granted", ("count",), "One more of the readers is done."),
        _T(
            "granted",
            "last-reader",
            GONE,
            ("count", "end-read"),
            "All readers are done: void the fence, free the blocks.",
        ),
        _T("granted", "expire", GONE, ("end-expired",), "Nobody asked in time: void the fence, free the blocks."),
        _T(
            "granted",
            "release",
            GONE,
            ("end-revoked",),
            "Taken back by the scheduler: void the fence, free the blocks.",
        ),
    ),
)
