"""Pending work of this engine: reports of its workers (`AwaitedReports`), and free blocks (`Shortage`).

Beside other connectors (vLLM's MultiConnector) each connector receives the reports of all of them; ids that are not awaited
here belong to another connector. The scheduler counts and logs a failed read, the ranks do not, because the scheduler knows
whether the request still wanted it: one line with the reason of each rank, unless lines of its codes are rate-limited.

A shortage: requests could start but find no free blocks while the engine computes nothing. Leases keep blocks until their
readers come, and normally a request just waits for that, as it does with vLLM's own connector. But an engine that also reads
may be in a circle: its blocks are leased to a peer whose requests wait for blocks there, which are leased to requests that wait
here. Each side renews the leases that keep the other from reading, so neither ends by itself. Such an engine gives up its
newest waiting read (`SchedulerState.give_way`): the prompt is computed here, and the peer gets its blocks back.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from vllm_adapter.observe.cause_log import CauseLog
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import StepPlan
    from vllm_adapter.steps import ReadFailure, StepReport

__all__ = ["AwaitedReports", "Shortage"]


@final
class AwaitedReports:
    """Requests whose end the workers will report. Scheduler's thread only."""

    def __init__(self, recorder: Recorder, log: CauseLog) -> None:
        self._recorder = recorder
        self._log = log
        self._reads: set[str] = set()
        # The subset of `_reads` that streams a prompt which its peer is still computing.
        self._streamed: set[str] = set()
        self._leases: set[str] = set()
        self._refused: set[str] = set()
        # Those of `_reads` whose request the host has ended with an error since the latest step.
        self._erred: set[str] = set()
        # Failures of ranks, by request; a read is reported once all other ranks have ended, too.
        self._failures: defaultdict[str, list[ReadFailure]] = defaultdict(list)

    def ordered(self, plan: StepPlan) -> None:
        """Record the reads and failures that a step orders."""
        self._erred.clear()
        plain = [order.request_id for order in plan.reads if order.is_reported]
        streamed = [order.read.request_id for order in plan.streams.watches]
        self._reads.update(plain, streamed)
        self._streamed.difference_update(plain)
        self._streamed.update(streamed)
        self._refused.update(plan.failures)

    @property
    def is_awaiting(self) -> bool:
        """Whether a read is in progress or a lease is open."""
        return bool(self._reads or self._leases)

    @property
    def is_awaiting_whole(self) -> bool:
        """Whether an end is expected soon: of the read of a finished prompt, or of a lease."""
        return len(self._reads) > len(self._streamed) or bool(self._leases)

    def leased(self, request_id: str) -> None:
        """Record a finished request whose blocks are kept for a reader."""
        self._leases.add(request_id)

    def erred(self, request_id: str) -> None:
        """Record that the host has ended a request with an error.

        Under the policy "fail" it does so for a failed read, before it passes on the report of that read.
        """
        if request_id in self._reads:
            self._erred.add(request_id)

    def take(self, report: StepReport) -> tuple[list[str], list[str], list[str]]:
        """Return the awaited ids of a report, sorted: leases that have ended, reads that have ended, and those that failed."""
        for failure in report.failures:
            if failure.request_id in self._reads:
                self._failures[failure.request_id].append(failure)
        sent = _take(self._leases, report.sent)
        ended = sorted({*_take(self._refused, report.received), *_take(self._reads, report.received)})
        self._streamed.intersection_update(self._reads)
        return sent, ended, [request_id for request_id in ended if request_id in report.failed]

    def log_failures(self, request_ids: Iterable[str], live: Container[str]) -> None:
        """Count and log each failed read for which a rank gave a reason; reads with the same codes share a rate limit.

        A read whose request had ended was cancelled by this engine: its client left, or the host aborted it. That is no failure,
        whatever the ranks' reasons are: a peer may also be lost while the cancelled read leaves the wire.

        Args:
            request_ids: Requests whose read has failed.
            live: Requests that have not ended here.
        """
        for request_id in request_ids:
            failures = self._failures.pop(request_id, [])
            if not failures:
                continue
            if request_id not in live and request_id not in self._erred:
                self._recorder.observe("cancelled_read_codes", "request-ended")
                self._log.info(
                    "request-ended", "request %s: its read was cancelled, as the request had ended", request_id
                )
                continue
            codes = sorted({failure.code for failure in failures})
            for code in codes:
                self._recorder.observe("read_failure_codes", code)
            self._log.error(
                " ".join(codes),
                "request %s: its KV was not taken over %s; kv_load_failure_policy decides what becomes of it",
                request_id,
                _reason(failures),
            )


def _reason(failures: Sequence[ReadFailure]) -> str:
    """Return the ranks that could not read, and their reasons.

    Example: `"by ranks 0.0, 0.1 from request p1 of engine P: timed out; by rank 0.2 from ..."`.
    """
    ranks: defaultdict[str, list[str]] = defaultdict(list)
    for failure in sorted(failures, key=lambda one: one.rank):
        pp_rank, tp_rank = failure.rank
        ranks[failure.text].append(f"{pp_rank}.{tp_rank}")
    return "; ".join(f"by rank{'s' * (len(of) > 1)} {', '.join(of)} from {reason}" for reason, of in ranks.items())


def _take(awaited: set[str], request_ids: Iterable[str]) -> list[str]:
    taken = sorted(awaited.intersection(request_ids))
    awaited.difference_update(taken)
    return taken


_PATIENCE_S: Final = 1.0
"""Wait before a shortage counts, and between two reads that are given up: blocks that free themselves, as at the end of a read,
are free by then."""


@final
class Shortage:
    """Measures how long requests have been ready for blocks in steps that compute nothing. Scheduler's thread only.

    A request becomes ready when the host has been given the number of tokens to read for it, zero included, or when its read has
    ended. It stops being ready when the host allocates its blocks. Without a read, the host computes it in the same step.

    Example: from 2.0 s on, in empty steps, the host is given 48 tokens and allocates nothing: `lasts` is True at 3.0 s and, if
    nothing changes, about a second later again.
    """

    def __init__(self) -> None:
        self._is_told = False
        self._loaded: set[str] = set()
        self._since_s: float | None = None

    def told(self, tokens: int | None) -> None:
        """Record the answer given to the host about a request; None: the request is not ready."""
        self._is_told = tokens is not None

    def loaded(self, request_ids: Iterable[str]) -> None:
        """Record requests whose read succeeded: the host continues with them without asking again."""
        self._loaded.update(request_ids)

    def allocated(self, request_id: str) -> None:
        """Record that a request has its blocks."""
        self._is_told = False
        self._loaded.discard(request_id)

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._loaded.discard(request_id)

    def lasts(self, now_s: float, *, is_empty: bool, streams_lack_blocks: bool, is_roomy: bool = False) -> bool:
        """Return whether to give up a read; call once at the end of each step. The wait then begins anew.

        Args:
            now_s: The time.
            is_empty: Whether the step computes nothing.
            streams_lack_blocks: Whether an offer waits for blocks.
            is_roomy: Whether so many blocks are free that a prompt which was read cannot lack any. The host tells no connector
                that it is paused, and does not continue with such a prompt then.
        """
        has_loaded = bool(self._loaded) and not is_roomy
        is_short = is_empty and (self._is_told or has_loaded or streams_lack_blocks)
        self._is_told = False
        if not is_short:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < _PATIENCE_S:
            return False
        self._since_s = None
        return True
