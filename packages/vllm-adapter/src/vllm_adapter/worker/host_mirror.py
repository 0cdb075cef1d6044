"""Host-buffer mode: peers read and write a mirror of the cache in host memory, because NIXL cannot register the device's.

Theory of operation. The mirror has the same layout as the cache at other addresses, so geometry, plans and registration are the
same. The difference is when blocks are copied between the two.

- Producer: after the forward pass of a step, the blocks that the step computed for prompts that will be handed over are copied to
  the mirror. On a device with streams a separate thread makes the copies, in order, behind an event. The ticket of a prompt that
  is complete with this step may be out before the next one, so the step waits for the copies of that prompt.
- Consumer: copies of received blocks to the device are queued on the engine thread before the read is reported.

A block may get a new owner while an old copy of it is still queued. Another prompt's copy comes later in the same order, but a
read into the mirror would not, so all copies are waited for before reads are given to the transfer thread.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from vllm_adapter.worker.conversion import PageRange, page_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.ports import BlockIds, PageNumbers

__all__ = ["HostMirror", "MirrorMemory", "PageCopy"]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The same pages of several regions.

    Attributes:
        ranges: Page ranges in the mirror, ascending.
        page_bytes: Bytes of a page.
        pages: Page numbers, ascending, each once.
    """

    ranges: tuple[PageRange, ...]
    page_bytes: int
    pages: PageNumbers


class MirrorMemory(Protocol):
    """The device's cache and its mirror in host memory."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether `save` may run on another thread while the device computes."""
        ...

    def mark(self) -> object:
        """Return a mark behind all the work that this thread has given the device so far."""
        ...

    def save(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages to the mirror once `after` has been reached; the copies are complete when this returns."""
        ...

    def restore(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages to the device once `after` has been reached, before any work that the calling thread gives the device next.

        On a device that works asynchronously the calling thread does not wait.
        """
        ...


@final
class HostMirror:
    """Copies blocks between the device and its mirror. Engine thread only.

    Args:
        memory: The device's cache and its mirror.
        document: This rank's geometry document, whose addresses are the mirror's.
    """

    def __init__(self, memory: MirrorMemory, document: GeometryDocument) -> None:
        self._memory = memory
        self._null_block = document["null_block"]
        self._pages_per_block = [group["pages_per_block"] for group in document["groups"]]
        self._regions = _regions_by_group(document)
        self._thread = ThreadPoolExecutor(1, "kv-host-saves") if memory.is_asynchronous else None
        self._waiting: dict[str, list[Future[None]]] = {}
        self._last: Future[None] | None = None
        self._reads_after: object = None

    def save(self, saves: Iterable[tuple[str, BlockIds]]) -> None:
        """Start copying (request, blocks per group) to the mirror, in this order."""
        after = self._memory.mark()
        for request_id, blocks in saves:
            copies = self._copies(blocks)
            if self._thread is not None:
                future = self._thread.submit(self._memory.save, copies, after)
            else:
                future = _done_now(self._memory, copies, after)
            self._waiting.setdefault(request_id, []).append(future)
            self._last = future

    def settle(self, request_ids: Iterable[str]) -> dict[str, str]:
        """Wait until all copies of these requests have ended; return the error of each request of which one failed."""
        failed: dict[str, str] = {}
        for request_id in request_ids:
            for future in self._waiting.pop(request_id, ()):
                error = future.exception()
                if error is not None:
                    failed[request_id] = f"{type(error).__name__}: {error}"
        return failed

    def then(self, request_id: str, action: Callable[[], None]) -> None:
        """Run an action after all copies of a request that were started so far; never if one of them failed."""
        copies = tuple(self._waiting.get(request_id, ()))

        def run() -> None:
            if all(copy.exception() is None for copy in copies):
                action()

        if self._thread is not None:
            self._thread.submit(run)  # runs after these copies: the thread works in order
        else:
            run()

    def settle_all(self) -> None:
        """Wait until no copy is in progress, including copies of forgotten requests; failures are kept for `settle`."""
        if self._last is not None:
            self._last.exception()
            self._last = None

    def settle_device(self) -> None:
        """Wait until the device has finished all work of this thread, restores included; for shutdown, not for a step."""
        if self._thread is not None:
            self._thread.submit(self._memory.save, (), self._memory.mark()).result()

    def begin_reads(self) -> None:
        """Prepare for reads into blocks that had other owners until now: wait for all copies, and mark the device."""
        self.settle_all()
        self._reads_after = self._memory.mark()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that will not be handed over."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def restore(self, blocks: BlockIds) -> None:
        """Copy received blocks to the device; raises any exception of the device.

        The blocks had their former owners until their read was ordered; work given to the device later does not touch them.
        """
        self._memory.restore(self._copies(blocks), self._reads_after)

    def close(self) -> None:
        """Stop the thread, if there is one, after its copies; idempotent."""
        if self._thread is not None:
            self._thread.shutdown()

    def _copies(self, blocks: BlockIds) -> list[PageCopy]:
        copies: list[PageCopy] = []
        for ids, per_block, regions in zip(blocks, self._pages_per_block, self._regions, strict=True):
            held = sorted({block for block in ids if block != self._null_block})
            pages = np.array([n for block in held for n in range(block * per_block, (block + 1) * per_block)], np.int64)
            if held:
                copies += [PageCopy(ranges, page_bytes, pages) for page_bytes, ranges in regions.items()]
        return copies


def _regions_by_group(document: GeometryDocument) -> list[dict[int, tuple[PageRange, ...]]]:
    """Return the page ranges of each group's regions by page size; ranges that layers share are listed once."""
    found: list[dict[int, set[PageRange]]] = [{} for _ in document["groups"]]
    for region, pages in zip(document["regions"], page_ranges(document), strict=True):
        for group in {member.group for member in region["members"]}:
            found[group].setdefault(region["page_bytes"], set()).add(pages)
    return [
        {page_bytes: tuple(sorted(ranges, key=lambda r: r.address)) for page_bytes, ranges in by_size.items()}
        for by_size in found
    ]


def _done_now(memory: MirrorMemory, copies: Sequence[PageCopy], after: object) -> Future[None]:
    future: Future[None] = Future()
    try:
        memory.save(copies, after)
    except Exception as error:  # noqa: BLE001  (kept for `settle`, like one of the thread's)
        future.set_exception(error)
    else:
        future.set_result(None)
    return future
