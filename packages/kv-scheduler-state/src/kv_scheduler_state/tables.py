"""The machines of a hand-over, as tables.

Theory of operation. A request has up to two records in a scheduler process: a *producer* record if a peer is to read its
blocks, and a *consumer* record if its prompt is to be read from a peer. A first-turn prefill has only the former, a decode
only the latter; with readback a request has both. The third machine, the *lease*, runs once per worker of the producer and
decides until when a reader may count on the blocks.

The engine's own rules shape the tables. A request that was parked for a read must be reported by the workers once,
even if it was aborted meanwhile, because the engine keeps its blocks until then: hence `draining`. A request that
needs no read is never reported: hence `hit` orders a notification and is done. A lease, once granted, belongs to the
workers, and the scheduler only learns its end: hence `leased` has no way out but `sent`.

Streamed hand-overs. A router sends one request to two engines at once, under one hand-over id. The rows here are those
that streams add to the producer's and the consumer's machine; a *reader* lives in every worker of the consumer while a
stream runs there. The prompt's blocks are read while it is computed: a worker of the producer publishes in a progress word how
many tokens the device has finished, and a reader orders the whole blocks behind it.

Nothing that was read counts until the fence word, read after the last part of all chunks has landed, still shows the
generation of the offer. The generation changes at every restart, so blocks that were read from an earlier start never
count. From the moment an offer may be out, blocks and slot come back only after every worker has voided the word and said so
(`sent`): `early` may end at once, every other state of a streamed producer ends by way of `voiding` or `streamed`.

A reader reports once its memory is quiet, never before. So the consumer needs no state for a broken read that is still on the
wire, and `awaiting` may give the same blocks to another stream, or to the plain read of the final ticket.

A table lists every legal (state, event) pair once: the state it leads to, the effects that must follow and why. Nothing else
decides what is legal. The code that owns a machine asks the table first, and acts on the row it gets; the documents' diagrams
are drawn from the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from kv_scheduler_state.errors import IllegalTransition, InvalidConfig

__all__ = [
    "CONSUMER_TABLE",
    "GONE",
    "LEASE_TABLE",
    "NEW",
    "PRODUCER_TABLE",
    "STREAM_CONSUMER_TABLE",
    "STREAM_PRODUCER_TABLE",
    "STREAM_READER_TABLE",
    "Table",
    "Transition",
]

NEW = "new"
"""State of a request before its first event."""
GONE = "gone"
"""The one end of every machine; a request in it is forgotten."""


@final
@dataclass(frozen=True, slots=True)
class Transition:
    """A legal step.

    Attributes:
        state: State before.
        event: Name of the event.
        target: State afterwards.
        effects: Names of the actions that must follow.
        why: Reason, a sentence for the reader of the documents.
    """

    state: str
    event: str
    target: str
    effects: tuple[str, ...]
    why: str


@final
class Table:
    """The transitions of one machine.

    Args:
        name: Name of the machine in messages.
        rows: Its transitions.

    Raises:
        InvalidConfig: `invalid-config`, if two rows share a state and an event, or a row leaves the end.
    """

    def __init__(self, name: str, rows: tuple[Transition, ...]) -> None:
        self.name = name
        self.rows = rows
        # Every state, in order of first mention, with its rows by event.
        states = [state for row in rows for state in (row.state, row.target)]
        self._by_state: dict[str, dict[str, Transition]] = {state: {} for state in states}
        for row in rows:
            events = self._by_state[row.state]
            if row.event in events or row.state == GONE:
                raise InvalidConfig(f"{name}: '{row.state}' x '{row.event}' is listed twice or leaves the end")
            events[row.event] = row

    def get(self, state: str, event: str) -> Transition | None:
        """Return the row for an event, or None."""
        return self._by_state[state].get(event)

    def find(self, request_id: str, state: str, event: str) -> Transition:
        """Return the row for an event.

        Raises:
            IllegalTransition: `illegal-transition`, if the table has none.
        """
        row = self._by_state[state].get(event)
        if row is None:
            raise IllegalTransition(self.name, request_id, state, event)
        return row


_T = Transition

PRODUCER_TABLE: Final = Table(
    "producer",
    (
        _T(NEW, "arrive", "waiting", (), "The prompt is queued; no peer can read it yet."),
        _T("waiting", "allocate", "prefilling", ("announce",), "Workers learn the id and the fence before any reader."),
        _T("waiting", "drop", GONE, (), "Aborted or failed before the workers heard of it."),
        _T("prefilling", "allocate", "prefilling", (), "Engines may allocate a second time."),
        _T("prefilling", "chunk", "prefilling", ("save",), "A part of the prompt runs in this step."),
        _T("prefilling", "last-chunk", "prefilled", ("save", "complete"), "The rest runs in this step."),
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
        _T("leased", "revoke", "revoked", ("order-revoke",), "The workers end it early."),
        _T("leased", "sent", GONE, ("return-slot",), "Every worker's lease ended; the engine frees the blocks."),
        _T("revoked", "sent", GONE, ("return-slot",), "Every worker's lease ended; the engine frees the blocks."),
    ),
)

CONSUMER_TABLE: Final = Table(
    "consumer",
    (
        _T(NEW, "arrive", "queued", ("start-heartbeat",), "The peer keeps the blocks while the request waits."),
        _T("queued", "load", "reading", ("order-read",), "Blocks are allocated; the engine parks the request."),
        _T("queued", "hit", "local", ("order-notify", "stop-heartbeat"), "Nothing is left to read: notify the peer."),
        _T("queued", "hit-shared", "local", ("stop-heartbeat",), "Another request reads the same ticket."),
        _T("queued", "finish", GONE, ("order-notify", "stop-heartbeat"), "Ended before allocation: notify the peer."),
        _T("queued", "finish-shared", GONE, ("stop-heartbeat",), "Another request reads the same ticket."),
        _T("reading", "done", "local", ("end-read", "stop-heartbeat"), "The data is here and its fence was verified."),
        _T("reading", "broken", "local", ("end-read", "stop-heartbeat"), "The read failed: computed here."),
        _T("reading", "broken-for-good", "failed", ("end-read", "stop-heartbeat"), "The policy is to fail."),
        _T("reading", "finish", "draining", ("cancel-read", "stop-heartbeat"), "The blocks stay until then."),
        _T("reading", "finish-shared", "draining", ("pass-read", "stop-heartbeat"), "Then its next holder reads."),
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
        _T("expected", "release", GONE, ("end-released",), "No hand-over after all; no peer holds a ticket."),
        _T("granted", "renew", "granted", ("extend",), "A heartbeat: the later of both deadlines holds."),
        _T("granted", "reader", "granted", ("count",), "One more of the readers is done."),
        _T("granted", "last-reader", GONE, ("count", "end-read"), "All are done: void the fence, free the blocks."),
        _T("granted", "expire", GONE, ("end-expired",), "Not renewed: void the fence, free the blocks."),
        _T("granted", "release", GONE, ("end-revoked",), "Taken back: void the fence, free the blocks."),
    ),
)


_VOIDED = "Its blocks were taken: the word moves before they are written."
_AGAIN = "Engines may allocate a second time."
_LATER = "No peer reads it yet; questions stay parked."
_GIVEN_UP = "Read no more; the workers report it as failed once they are quiet."

STREAM_PRODUCER_TABLE: Final = Table(
    "producer",
    (
        _T(NEW, "arrive-early", "early", (), "The prompt is queued; questions for it are parked."),
        _T("early", "allocate", "opening", ("take-slot",), "Its words have a place from now on."),
        _T("early", "drop", GONE, ("refuse",), "Ended before any word was written."),
        _T("opening", "no-slot", "plain", ("announce",), "No place is free: it is read once it is finished."),
        _T("opening", "allocate", "opening", (), _AGAIN),
        _T("opening", "chunk", "offered", ("open", "publish", "save"), "The first part is scheduled: offer it."),
        _T("opening", "last-chunk", "complete", ("open", "publish", "save", "complete"), "It is one part."),
        _T("opening", "preempt", "voided", ("void",), _VOIDED),
        _T("opening", "reset", "opening", (), "Nothing of this start has been computed."),
        _T("opening", "drop", "voiding", ("void", "refuse"), "The word of an earlier start may still be on its way."),
        _T("offered", "allocate", "offered", (), _AGAIN),
        _T("offered", "chunk", "offered", ("publish", "save"), "Another part, with the ids of its blocks."),
        _T("offered", "last-chunk", "complete", ("publish", "save", "complete"), "The rest runs in this step."),
        _T("offered", "preempt", "voided", ("void", "forget-saves"), _VOIDED),
        _T("offered", "reset", "stale", ("void",), "What was computed before now must not be used."),
        _T("offered", "drop", "voiding", ("void", "refuse"), "Aborted: blocks and slot stay until the word has moved."),
        _T("complete", "allocate", "complete", (), _AGAIN),
        _T("complete", "last-chunk", "complete", (), "Steps of a longer answer; the prompt is what is handed over."),
        _T("complete", "preempt", "voided", ("void", "forget-saves"), _VOIDED),
        _T("complete", "reset", "stale", ("void",), "What was computed before now must not be used."),
        _T("complete", "drop", "voiding", ("void", "refuse"), "Failed: blocks and slot stay until the word has moved."),
        _T("complete", "hand-over", "streamed", ("finalise",), "The same generation goes on as a lease."),
        _T("stale", "allocate", "stale", (), _AGAIN),
        _T("stale", "chunk", "stale", (), "Only a restart makes it whole again."),
        _T("stale", "last-chunk", "stale", (), "Only a restart makes it whole again."),
        _T("stale", "reset", "stale", (), "It is void already."),
        _T("stale", "preempt", "voided", ("forget-saves",), "It is void already."),
        _T("stale", "drop", "voiding", ("void", "refuse"), "Blocks and slot stay until the word has moved."),
        _T("voided", "allocate", "opening", ("renew-slot",), "It starts again under a new generation."),
        _T("voided", "reset", "voided", (), "It is void already."),
        _T("voided", "drop", "voiding", ("void", "refuse"), "The workers say when the word has moved."),
        _T("voiding", "sent", GONE, ("give-back",), "Every worker moved its word; the engine frees the blocks."),
        _T("plain", "allocate", "plain", (), _AGAIN),
        _T("plain", "chunk", "plain", ("save",), _LATER),
        _T("plain", "last-chunk", "plain", ("save", "complete"), _LATER),
        _T("plain", "preempt", "plain-again", ("forget-saves",), "No peer has read any of it."),
        _T("plain", "drop", GONE, ("withdraw", "refuse"), "Ended; no word of a stream was written."),
        _T("plain", "hand-over", "streamed", ("finalise",), "Finished: its ticket answers the questions."),
        _T("plain-again", "allocate", "plain", ("restart",), "It starts again, under the same id and a new fence."),
        _T("plain-again", "drop", GONE, ("withdraw", "refuse"), "Ended; no word of a stream was written."),
        _T("streamed", "revoke", "taken-back", ("order-revoke",), "The workers end it early."),
        _T("streamed", "sent", GONE, ("give-back",), "Every worker's lease ended, and each moved its word before."),
        _T("taken-back", "sent", GONE, ("give-back",), "Every worker's lease ended; the engine frees the blocks."),
    ),
)

STREAM_CONSUMER_TABLE: Final = Table(
    "consumer",
    (
        _T(NEW, "arrive-early", "asking", ("ask",), "Nothing is reserved; the engine looks at those behind."),
        _T("asking", "offer", "offered", ("start-heartbeat",), "It runs; blocks are reserved once there is room."),
        _T("asking", "final", "queued", ("join", "start-heartbeat", "leave"), "The prompt is finished: as any other."),
        _T("asking", "retry", "asking", ("ask",), "The peer does not know the id yet, or had no place to park."),
        _T("asking", "refuse", "local", ("leave",), "No stream, and nothing is reserved: computed here."),
        _T("asking", "expire", "local", ("cancel-question", "leave"), "No answer in time: computed here."),
        _T("asking", "hit", "local", ("cancel-question", "leave"), "Nothing is left to read."),
        _T("asking", "misfit", "asking-final", ("ask",), "Blocks of other sizes there: read as a whole."),
        _T("asking", "preempt", "asking", (), "It had computed nothing."),
        _T("asking", "finish", GONE, ("cancel-question", "leave"), "Ended here; the peer need not keep a place."),
        _T("offered", "load", "streaming", ("order-stream",), "Blocks are allocated; the engine parks the request."),
        _T("offered", "hit", "local", ("order-notify", "stop-heartbeat", "leave"), "Nothing is left to read."),
        _T("offered", "expire", "asking-final", ("stop-heartbeat", "ask"), "No room in time: read as a whole."),
        _T("offered", "finish", GONE, ("order-notify", "stop-heartbeat", "leave"), "Ended here first."),
        _T("asking-final", "final", "queued", ("join", "start-heartbeat", "leave"), "It is finished: as any other."),
        _T("asking-final", "retry", "asking-final", ("ask",), "The peer had no place to park the question."),
        _T("asking-final", "refuse", "local", ("order-notify", "leave"), "Computed here; the peer may hold it."),
        _T("asking-final", "expire", "local", ("cancel-question", "order-notify", "leave"), "No answer in time."),
        _T("asking-final", "hit", "local", ("cancel-question", "order-notify", "leave"), "Nothing is left to read."),
        _T("asking-final", "preempt", "asking-final", (), "It had computed nothing."),
        _T("asking-final", "finish", GONE, ("cancel-question", "order-notify", "leave"), "Ended here first."),
        _T("streaming", "done", "local", ("end-stream", "stop-heartbeat"), "Every worker's fence held."),
        _T("streaming", "torn", "awaiting", ("stop-heartbeat", "ask"), "All workers are quiet: read anew."),
        _T("streaming", "broken", "local", ("end-stream", "stop-heartbeat"), "The workers fail it."),
        _T("streaming", "broken-for-good", "failed", ("end-stream", "stop-heartbeat"), "Failed for good."),
        _T("streaming", "reset", "stopping", ("stop-stream", "stop-heartbeat"), _GIVEN_UP),
        _T("streaming", "finish", "draining-stream", ("stop-stream", "stop-heartbeat"), "The blocks stay until then."),
        _T("awaiting", "offer", "streaming", ("start-heartbeat", "order-stream"), "It started again: read anew."),
        _T("awaiting", "final", "reading", ("join", "start-heartbeat", "order-final", "leave"), "Same blocks."),
        _T("awaiting", "retry", "awaiting", ("ask",), "The peer had no place to park the question."),
        _T("awaiting", "refuse", "stopping", ("stop-stream",), _GIVEN_UP),
        _T("awaiting", "expire", "stopping", ("cancel-question", "stop-stream"), _GIVEN_UP),
        _T("awaiting", "reset", "stopping", ("cancel-question", "stop-stream"), _GIVEN_UP),
        _T("awaiting", "finish", "draining-stream", ("cancel-question", "stop-stream"), "The workers report the end."),
        _T("stopping", "torn", "stopping", (), "A report that crossed with the order."),
        _T("stopping", "done", "local", ("end-stream",), "All workers had read it before the order came."),
        _T("stopping", "broken", "local", ("end-stream",), "The prompt is computed here."),
        _T("stopping", "broken-for-good", "failed", ("end-stream",), "The policy is to fail."),
        _T("stopping", "reset", "stopping", (), "It is given up already."),
        _T("stopping", "finish", "draining-stream", (), "It is given up already."),
        _T("draining-stream", "torn", "draining-stream", (), "A report that crossed with the order."),
        _T("draining-stream", "done", GONE, ("end-stream",), "The engine frees the blocks."),
        _T("draining-stream", "broken", GONE, ("end-stream",), "The engine frees the blocks."),
        _T("draining-stream", "broken-for-good", GONE, ("end-stream",), "The engine frees the blocks."),
    ),
)

STREAM_READER_TABLE: Final = Table(
    "stream-reader",
    (
        _T(NEW, "watch", "watching", (), "The peer's progress word is polled."),
        _T("watching", "progress", "watching", ("order-part",), "Whole blocks up to the finished tokens are read."),
        _T("watching", "whole", "finishing", ("order-last-part",), "All is finished: last blocks, windows and states."),
        _T("watching", "changed", "breaking", (), "Another generation: nothing that was read counts."),
        _T("watching", "stall", "breaking", (), "No progress in time."),
        _T("watching", "part-lost", "breaking", (), "A part failed on the wire."),
        _T("watching", "cancel", "breaking", (), "The request ended here."),
        _T("finishing", "quiet", "fencing", ("read-fence",), "All parts of all chunks landed: now the fence decides."),
        _T("finishing", "stall", "breaking", (), "The last parts did not land in time."),
        _T("finishing", "part-lost", "breaking", (), "A part failed on the wire."),
        _T("finishing", "cancel", "breaking", (), "The request ended here."),
        _T("fencing", "held", GONE, ("report-done",), "The generation is that of the offer: the data counts."),
        _T("fencing", "lost", GONE, ("report-broken",), "Another generation, or the word could not be read."),
        _T("fencing", "stall", GONE, ("report-broken",), "No word in time; the pages have been quiet for long."),
        _T("fencing", "cancel", GONE, ("report-broken",), "The request ended here; the pages are quiet."),
        _T("breaking", "quiet", GONE, ("report-broken",), "Nothing is on the wire any more."),
    ),
)
