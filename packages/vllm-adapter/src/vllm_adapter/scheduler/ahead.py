"""Short reads that end before the host gives their requests blocks, where both halves of an engine live in one process.

For a read between steps vLLM gives blocks and parks the request: a step passes that computes nothing of it, and with two steps in
flight the next one as well. So the read runs while vLLM asks for the tokens, into free blocks that are taken from its pool. Once
the data is here and its fence has held, these go back to the front of the pool, and vLLM hears that so many tokens are loaded. It
takes blocks from the front, so the request gets the very same ones. Nothing is copied, and until then nothing else writes there.

Example: blocks of 16 tokens, a prompt of 41. Blocks 7, 3 and 9 are taken and read into. They go back in front of the pool, the
answer is 40 tokens, because vLLM computes the last token of a prompt itself, and the request gets 7, 3 and 9.

Only with one cache group: vLLM accepts no block as not loaded where there are more (`invalid_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

from vllm_adapter.observe.recorder import Guard
from vllm_adapter.steps import MOST_READS, SHORT_READS, StepOrders, StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import BlockIds, SchedulerState
    from vllm_adapter.scheduler.followed import FollowedRequest, FollowedRequests

__all__ = ["FreeBlocks", "ReadAhead", "ReadsHere"]

_FREE_SHARE, _NEEDED_SHARE = 8, 16
"""Reads leave an eighth of all blocks free; with less than a sixteenth free, they give blocks back."""


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """The host's pool of free blocks.

    Attributes:
        count: Returns how many there are.
        take: Takes so many from its front, and returns their ids.
        give_back: Frees blocks that were taken.
        cached: Returns the block with the content of a hash; None for none.
    """

    count: Callable[[], int]
    take: Callable[[int], list[int]]
    give_back: Callable[[Sequence[int]], None]
    cached: Callable[[Any], int | None]

    def takes_latest_first(self) -> bool:
        """Return whether blocks that are freed together are taken next, in the same order.

        Source: `BlockPool.free_blocks` of vLLM 0.32, for blocks without cached content.
        """
        if self.count() < 2:
            return False
        first = self.take(2)
        self.give_back(first[::-1])
        again = self.take(2)
        self.give_back(again)
        return again == first[::-1]


@dataclass(frozen=True, slots=True)
class ReadsHere:
    """The worker's half of this process.

    Attributes:
        order: Carries out reads, and waits for them as long as the orders allow.
        take_ends: Returns the ends of such reads.
        generation: Returns the number of its registration.
        invalid_blocks: Blocks that it reports to the host as not loaded.
    """

    order: Callable[[StepOrders], None]
    take_ends: Callable[[], StepReport]
    generation: Callable[[], int]
    invalid_blocks: set[int]


@dataclass(slots=True)
class _Read:
    """A read of the tokens `first` to `stop` of a prompt into blocks of the pool.

    It is `offered` from the answer to the host until the host has given its blocks, or not, and `void` if it runs for nothing.
    """

    ids: list[int]
    first: int
    stop: int
    generation: int
    state: Literal["reading", "read", "offered", "void"] = "reading"


@final
class ReadAhead:
    """Reads short prompts while the host asks for them. Scheduler's thread only.

    Args:
        facts: This engine, with one cache group.
        state: The request machines.
        requests: The requests that take part in hand-overs.
        recorder: Takes observations and log lines.
        free: The host's pool.
        here: The worker's half.
        take_in: Takes in a report with ends of these reads.

    Attributes:
        reads: Reads whose blocks are kept here, by request: the host must go on with its steps until they are free.
    """

    def __init__(
        self,
        facts: EngineFacts,
        state: SchedulerState,
        requests: FollowedRequests,
        recorder: Recorder,
        free: FreeBlocks,
        here: ReadsHere,
        take_in: Callable[[StepReport], None],
    ) -> None:
        self._state, self._requests, self._recorder = state, requests, recorder
        self._free, self._here, self._take_in = free, here, take_in
        (group,) = facts.groups
        self._span, self._block_bytes = group.block_tokens, group.block_bytes
        self._spared, self._needed = facts.block_count // _FREE_SHARE, facts.block_count // _NEEDED_SHARE
        self._fails_requests = facts.load_failure_policy != "recompute"
        self._is_on = True
        # Reads and bytes that began in this step; requests whose read had ended before it, and which still lack blocks.
        self._step_reads = self._step_bytes = 0
        self._waiting: set[str] = set()
        self.reads: dict[str, _Read] = {}
        self._failed: set[str] = set()  # those of which the policy is to fail
        # Requests that have arrived since the last step. Their reads begin with the first one that the host asks for: one by one,
        # each would wait for the notification of the one before.
        self._arrived: dict[str, None] = {}

    def arrived(self, request: FollowedRequest) -> None:
        """Note a request that has arrived; it is read if its ticket is that of a finished prompt."""
        if not (request.is_early or request.arrival.is_computed_whole):
            self._arrived[request.arrival.request_id] = None

    def external_tokens(
        self, request: FollowedRequest, computed_tokens: int, tokens: int | None, *, is_beside: bool, now_s: float
    ) -> tuple[int | None, bool]:
        """Return the answer to the host, see `SchedulerSide.external_tokens`.

        Args:
            request: The request.
            computed_tokens: Tokens of its local prefix hit.
            tokens: Tokens that are to be read beyond it, as the request machines say.
            is_beside: Whether the engine computes for others.
            now_s: The monotonic clock.
        """
        request_id = request.arrival.request_id
        self._take_back()
        if tokens and not request.is_early:
            if not self._begin(request, computed_tokens, tokens, is_beside=is_beside, now_s=now_s):
                return tokens, True
            tokens = 0
        self._collect()
        read = self.reads.get(request_id)
        if request_id in self._failed:
            request.arrival.end_with_error()
            return None, False
        if read is None:
            return tokens, bool(tokens)
        if read.state != "read":
            return None, False
        return self._offered(request, read, computed_tokens), False

    def _begin(
        self, request: FollowedRequest, computed_tokens: int, tokens: int, *, is_beside: bool, now_s: float
    ) -> bool:
        """Begin the read of a request, and with it those of all that arrived with it; return whether it has begun."""
        hit = self._hit(request, computed_tokens) if computed_tokens else frozenset[int]()
        if hit is None or not self._is_on:
            return False
        most_bytes, wait_s = SHORT_READS[False]
        take, request_id = partial(self._take, hit=hit, most_bytes=most_bytes, now_s=now_s), request.arrival.request_id
        if not take(request_id, computed_tokens, tokens):
            return False
        self._arrived.pop(request_id, None)
        begun = [request_id]
        for name in self._arrived:
            with Guard(self._recorder, "short read", name):
                wanted = self._state.external_tokens(name, computed_tokens=0)
                if wanted and take(name, 0, wanted):
                    begun.append(name)
        self._arrived.clear()
        plan = self._state.take_reads(begun)
        for name in begun:
            self._requests.allocated(name, is_read=True)
        # A wait here would delay the requests that compute; those that are read run with the next step.
        rest_s = 0.0 if is_beside else wait_s
        links = self._requests.ordered(plan, now_s)
        with Guard(self._recorder, "order of short reads"):
            self._here.order(StepOrders(plan, links, rest_s=rest_s))
            return True
        self._collect(StepReport((), begun, begun))  # nothing was posted: a turn keeps the errors of its calls
        return True

    def _hit(self, request: FollowedRequest, computed_tokens: int) -> frozenset[int] | None:
        """Return the blocks of a local prefix hit; None if they are not known.

        The host has just found them, and keeps them from others once it has this answer: until then they are free as well.
        """
        count, is_odd = divmod(computed_tokens, self._span)
        found = {self._free.cached(each) for each in request.arrival.block_hashes()[:count]}
        known = frozenset(block for block in found if block is not None)
        return None if is_odd or len(known) != count else known

    def _take(
        self, request_id: str, computed_tokens: int, tokens: int, *, hit: frozenset[int], most_bytes: int, now_s: float
    ) -> bool:
        """Take blocks for a read and order it; return False if it is left to the host.

        Example: blocks of 16, 32 tokens are hit, 9 are to be read: the third block.
        """
        first, stop = computed_tokens // self._span, -(-(computed_tokens + tokens) // self._span)
        count, size = stop - first, (stop - first) * self._block_bytes
        if self._step_reads >= MOST_READS or not 0 < size <= most_bytes - self._step_bytes:
            return False
        if self._free.count() - count < self._spared:
            return False
        ids = self._free.take(count)
        if hit.isdisjoint(ids):
            with Guard(self._recorder, "short read", request_id):
                blocks = ([0] * first + ids,)
                self._state.allocate(
                    request_id,
                    block_ids=blocks,
                    new_block_ids=(ids,),
                    external_tokens=tokens,
                    is_parked=False,
                    now_s=now_s,
                )
                self.reads[request_id] = _Read(ids, computed_tokens, computed_tokens + tokens, self._here.generation())
                self._step_reads, self._step_bytes = self._step_reads + 1, self._step_bytes + size
                return True
        self._free.give_back(ids)
        return False

    def _collect(self, report: StepReport | None = None) -> None:
        """Take in the ends of reads, this report's or the worker's, and give the blocks of those back that are of no use."""
        if not self.reads:
            return
        report = self._here.take_ends() if report is None else report
        if not report.received:
            return
        self._take_in(report)
        for request_id in sorted(self.reads.keys() & set(report.received)):
            read, is_failed = self.reads[request_id], request_id in report.failed
            if read.state == "reading" and not is_failed:
                read.state = "read"
                continue
            self._drop(request_id)
            if is_failed and self._fails_requests and request_id in self._requests.live:
                self._failed.add(request_id)

    def _offered(self, request: FollowedRequest, read: _Read, computed_tokens: int) -> int:
        """Give the blocks of a read back, so that the host gives them to its request; return the tokens that they hold for it.

        The local hit may have grown: blocks of 16, tokens 16 to 40 were read into 3 and 9, now 32 are hit. Then 9 is offered.
        """
        request_id, stop = request.arrival.request_id, min(read.stop, request.arrival.prompt_tokens - 1)
        if computed_tokens >= stop:
            self._drop(request_id)  # all of it is here already
            return 0
        is_behind = computed_tokens >= read.first and not computed_tokens % self._span
        if not (is_behind and read.generation == self._here.generation() and self._is_on):
            reason = f"it was read from token {read.first} on, and {computed_tokens} are in the cache"
            self._give_up(request_id, "the cache has changed" if is_behind else reason)
            return 0
        begin, end = (computed_tokens - read.first) // self._span, -(-(stop - read.first) // self._span)
        self._free.give_back(read.ids[:begin] + read.ids[end:])
        read.ids = read.ids[begin:end]
        self._free.give_back(read.ids)  # last, so that they are in front
        read.first, read.stop, read.state = computed_tokens, stop, "offered"
        return stop - computed_tokens

    def _take_back(self) -> str:
        """Take the offered blocks again that the host has not given to their request, unless others have them; return its id."""
        for request_id, read in self.reads.items():
            if read.state == "offered":
                again = self._free.take(min(len(read.ids), self._free.count()))
                read.state = "read"
                if again != read.ids:
                    read.ids = again
                    self._give_up(request_id, "the host gave its blocks to others")
                return request_id
        return ""

    def allocated(self, request_id: str, block_ids: BlockIds, external_tokens: int) -> bool:
        """Return whether the host has just given a request the blocks that were offered, or computes it without them."""
        read = self.reads.get(request_id)
        if read is None or read.state != "offered":
            return False
        del self.reads[request_id]
        first = read.first // self._span
        count = -(-(read.first + external_tokens) // self._span) - first
        given = [*block_ids[0][first : first + count]]
        if external_tokens and given != read.ids[:count]:
            self._is_on = False
            self._here.invalid_blocks.update(given)
            self._recorder.observe("num_cancelled_reads", "other-blocks-given")
            self._recorder.error(
                "other-blocks-given",
                "request %s: the host gave it other blocks than those that its prompt was read into; they are reported as not "
                "loaded, and this engine reads no prompt ahead of its blocks any more (other-blocks-given)",
                request_id,
            )
        return True

    def finished(self, request_id: str) -> None:
        """Give the blocks of a request that has ended back; those of a read once it has ended."""
        self._arrived.pop(request_id, None)
        self._failed.discard(request_id)
        read = self.reads.get(request_id)
        if read is not None and read.state in {"reading", "void"}:
            read.state = "void"
        elif read is not None:
            self._drop(request_id)

    def reset(self) -> None:
        """Use nothing that was read before now; reads under way give their blocks back when they have ended."""
        self._take_back()
        for request_id in list(self.reads):
            self.finished(request_id)

    def step_ended(self, *, lacks_blocks: bool, is_idle: bool) -> None:
        """Look at the reads once the host has planned a step, and give blocks back that it may need.

        Args:
            lacks_blocks: Whether the host has asked for a request and given it no blocks.
            is_idle: Whether it has computed nothing for some steps. It has no use then for prompts that wait for their request:
                it is paused, or lacks blocks for all of them.
        """
        self._arrived.clear()
        self._step_reads = self._step_bytes = 0
        if not self.reads:
            return
        offered = self._take_back()
        self._collect()
        waiting = [name for name, read in self.reads.items() if read.state == "read"]
        for request_id in reversed(waiting):
            if is_idle and request_id in self._waiting:
                self._give_up(request_id, "the host computes nothing, and has not asked for it")
            elif request_id != offered and (lacks_blocks or self._free.count() < self._needed):
                self._give_up(request_id, "other requests need its blocks")
        self._waiting = self.reads.keys() & waiting

    def _give_up(self, request_id: str, reason: str) -> None:
        self._drop(request_id)
        self._recorder.observe("num_cancelled_reads", "blocks-given")
        self._recorder.warning(
            "blocks-given",
            "request %s: its prompt was read, and is computed here: %s (blocks-given)",
            request_id,
            reason,
        )

    def _drop(self, request_id: str) -> None:
        read = self.reads.pop(request_id)
        self._requests.loaded.discard(request_id)
        if read.state != "offered":  # those are free already
            self._free.give_back(read.ids)
