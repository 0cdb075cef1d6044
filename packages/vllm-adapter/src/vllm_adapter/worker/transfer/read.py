"""One request's read in progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from vllm_adapter.ports import ReadOrder
    from vllm_adapter.steps import ReadEnd, ReadTimes
    from vllm_adapter.worker.conversion import ConversionStep
    from vllm_adapter.worker.transfer.engines import PeerEngine
    from vllm_adapter.worker.transfer.parts import Rank

__all__ = ["FinishedRead", "Read"]


@final
@dataclass(frozen=True, slots=True)
class FinishedRead:
    """The end of a read, and what the engine thread must still do to the pages of a good one."""

    end: ReadEnd
    conversion: tuple[ConversionStep, ...] = ()


@final
@dataclass(slots=True, eq=False)
class Read:
    """A read from its order to its one end: a transfer per producer rank, perhaps in two attempts.

    Attributes:
        order: What is to be read.
        times: When its stages were reached.
        engine: The engine that it was posted to; None before.
        attempt: Number of the attempt under way; 0 before the first post.
        deadline_s: Time at which the read is given up, over both attempts.
        trusted_until_s: Time until which the peer's lease has not ended for certain.
        transfers: Transfers that are not over, by id.
        unquiet: Those of them that ended but may still write into the pages.
        done_ranks: Ranks whose part has arrived, fence verified; their completion has left.
        conversion: Steps that put its pages in order once all are there.
        code: Why it fails; empty so far.
        message: The same as a sentence.
        may_retry: Whether all failures so far are of a kind that a second attempt may mend.
        is_ended: Whether its end was reported.
        is_passed_on: Whether another request reads the same hand-over, so that the producer must not be told of an end.
    """

    order: ReadOrder
    times: ReadTimes
    engine: PeerEngine | None = None
    attempt: int = 0
    deadline_s: float = 0.0
    trusted_until_s: float = 0.0
    transfers: dict[str, Rank] = field(default_factory=dict[str, "Rank"])
    unquiet: set[str] = field(default_factory=set[str])
    done_ranks: set[Rank] = field(default_factory=set["Rank"])
    conversion: tuple[ConversionStep, ...] = ()
    code: str = ""
    message: str = ""
    may_retry: bool = True
    is_ended: bool = False
    is_passed_on: bool = False

    def transfer_id(self, rank: Rank) -> str:
        """Name of one rank's transfer, e.g. `r1/0.1`, and `r1/0.1+` at the second attempt."""
        return f"{self.order.request_id}/{rank[0]}.{rank[1]}" + "+" * (self.attempt - 1)

    def fail(self, code: str, message: str, *, may_retry: bool = False) -> bool:
        """Note a failure; return whether it is the first."""
        self.may_retry = self.may_retry and may_retry
        is_first = not self.code
        if is_first:
            self.code, self.message = code or "transfer-failed", message
        return is_first

    def begin_again(self) -> None:
        """Forget the first attempt's failure, for a second attempt on the ranks that are not done."""
        self.code = self.message = ""
        self.engine = None
