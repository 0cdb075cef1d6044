"""Worker reports that this connector waits for.

Beside other connectors (vLLM's MultiConnector) each connector receives the reports of all of them; ids that are not awaited
here belong to another connector. The scheduler counts and logs a failed read, the ranks do not, because the scheduler knows
whether the request still wanted it: one line with the reason of each rank, unless lines of its codes are rate-limited.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from vllm_adapter.observe.cause_log import CauseLog
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import StepPlan
    from vllm_adapter.steps import Rank, ReadFailure

__all__ = ["AwaitedReports"]


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
        self._reasons: defaultdict[str, dict[Rank, ReadFailure]] = defaultdict(dict)

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

    def explained(self, reasons: Mapping[str, Mapping[Rank, ReadFailure]]) -> None:
        """Record why reads failed, by request and rank; the failures are reported now or once all other ranks have ended."""
        for request_id, by_rank in reasons.items():
            if request_id in self._reads:
                self._reasons[request_id].update(by_rank)

    def sent(self, request_ids: Iterable[str]) -> list[str]:
        """Return the awaited leases among these requests, sorted by id."""
        return _take(self._leases, request_ids)

    def received(self, request_ids: Iterable[str], failed: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the awaited reads among these requests as (all, failed)."""
        ended = set(request_ids)
        refused = _take(self._refused, ended)
        mine = sorted({*_take(self._reads, ended), *refused})
        self._streamed.intersection_update(self._reads)
        return mine, sorted(set(mine).intersection(failed))

    def failed(self, request_ids: Iterable[str], live: Container[str]) -> None:
        """Count and log each failed read for which a rank gave a reason; reads with the same codes share a rate limit.

        A read whose request had ended was cancelled by this engine: its client left, or the host aborted it. That is no failure,
        whatever the ranks' reasons are: a peer may also be lost while the cancelled read leaves the wire.

        Args:
            request_ids: Requests whose read has failed.
            live: Requests that have not ended here.
        """
        for request_id in request_ids:
            failures = self._reasons.pop(request_id, {})
            if not failures:
                continue
            if request_id not in live and request_id not in self._erred:
                self._recorder.observe("cancelled_read_codes", "request-ended")
                self._log.info(
                    "request-ended", "request %s: its read was cancelled, as the request had ended", request_id
                )
                continue
            codes = sorted({failure.code for failure in failures.values()})
            for code in codes:
                self._recorder.observe("read_failure_codes", code)
            self._log.error(
                " ".join(codes),
                "request %s: its KV was not taken over %s; kv_load_failure_policy decides what becomes of it",
                request_id,
                _reason(failures),
            )


def _reason(failures: Mapping[Rank, ReadFailure]) -> str:
    """Return the ranks that could not read, and their reasons.

    Example: `"by ranks 0.0, 0.1 from request p1 of engine P: timed out; by rank 0.2 from ..."`.
    """
    ranks: defaultdict[str, list[str]] = defaultdict(list)
    for pp_rank, tp_rank in sorted(failures):
        ranks[failures[pp_rank, tp_rank].text].append(f"{pp_rank}.{tp_rank}")
    return "; ".join(f"by rank{'s' * (len(of) > 1)} {', '.join(of)} from {reason}" for reason, of in ranks.items())


def _take(awaited: set[str], request_ids: Iterable[str]) -> list[str]:
    taken = sorted(awaited.intersection(request_ids))
    awaited.difference_update(taken)
    return taken
