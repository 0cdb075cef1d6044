"""Ends of reads while nothing is registered: in vLLM's sleep mode (from 0.33 on), or after the transfer thread has died.

Theory of operation. Before the host unmaps the memory, the registration is closed. Every read ends with the code `asleep`, even
if its data has just arrived, because its pages are about to be lost. Every lease ends with its fence void. Then the agent is
closed, which ends the transfers on the wire (no transfer worker is left that could write) and deregisters the memory. Only then
may the host go on. Steps that run meanwhile get an answer to every order: reads fail, leases end.

Once the memory is mapped again, at the same addresses but empty, everything is registered again under another agent name and
generation. Requests outlive the sleep: a request that was announced to this worker before has a word in the old fence array and
KV in the lost memory. Such a request is *lost* until the host restarts it: then its new word is written into the new array, and
KV computed from there on may be handed over. If a lost request is granted a lease all the same, the lease ends at once, and
without a fence word no reader accepts its pages as valid (`ports.AnnouncedFences`).

After the transfer thread has died, the engine goes on without hand-overs. The next step voids the words of all requests, and
from then on every order is answered; once the thread has closed its agent, its remaining reads and leases end. A sleep and
wake-up register the memory again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_adapter.steps import ReadEnd, ReadTimes
from vllm_adapter.worker.transfer.records import FinishedRead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_adapter.ports import ReadOrder

__all__ = ["ASLEEP", "ASLEEP_MESSAGE", "DEAD", "DEAD_MESSAGE", "fail_reads", "failed_instead"]

ASLEEP = "asleep"
ASLEEP_MESSAGE = "this engine's cache memory was given back (sleep mode)"

DEAD = "thread-dead"
DEAD_MESSAGE = "the transfer thread of this rank has died; restart this engine"


def failed_instead(finished: FinishedRead, code: str = ASLEEP, message: str = ASLEEP_MESSAGE) -> FinishedRead:
    """Return a good read as a failed one, because its pages must not be used; a failed read is returned unchanged."""
    if not finished.end.is_ok:
        return finished
    return FinishedRead(replace(finished.end, code=code, message=message))


def fail_reads(reads: Iterable[ReadOrder], now_s: float, code: str, message: str) -> list[FinishedRead]:
    """Return failed ends for reads that are ordered while nothing is registered."""
    return [FinishedRead(ReadEnd(order, code, message, ReadTimes(now_s), now_s)) for order in reads]
