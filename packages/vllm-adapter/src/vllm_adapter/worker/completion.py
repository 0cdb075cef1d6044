"""Completion of good reads on the engine thread: pages are permuted, and in host-buffer mode copied to the device."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.steps import ReadEnd
    from vllm_adapter.worker.conversion import ConversionStep, PageConverter
    from vllm_adapter.worker.host_mirror import HostMirror
    from vllm_adapter.worker.transfer.records import FinishedRead

__all__ = ["ReadCompletion"]

_FAILURES = {
    "conversion": ("conversion-failed", "num_failed_conversions"),
    "mirror_restore": ("mirror-copy-failed", "num_failed_mirror_copies"),
}
"""Completion step -> (code, statistic) of its failure."""


@final
class ReadCompletion:
    """Completes good reads. Engine thread only.

    Args:
        converter: Permutes the bytes of received pages; None if no plan needs that.
        mirror: Copies received blocks to the device; None without host-buffer mode.
        recorder: Records observations.
    """

    def __init__(self, converter: PageConverter | None, mirror: HostMirror | None, recorder: Recorder) -> None:
        self._converter = converter
        self._mirror = mirror
        self._recorder = recorder

    def complete(self, finished: FinishedRead) -> ReadEnd:
        """Complete a read and return its end, which is a failed one if a step failed."""
        end, conversion = finished.end, finished.conversion
        if end.is_ok and conversion:
            end = self._attempt(end, "conversion", lambda: self._convert(conversion))
        mirror = self._mirror
        if end.is_ok and mirror is not None and end.order.is_reported:
            blocks = [blocks.ids for blocks in end.order.local_blocks]
            end = self._attempt(end, "mirror_restore", lambda: mirror.restore(blocks))
        return end

    def _convert(self, steps: Sequence[ConversionStep]) -> None:
        if self._converter is None:
            raise RuntimeError("a staged plan was made without a converter")
        self._converter.convert(steps)

    def _attempt(self, end: ReadEnd, step: str, action: Callable[[], None]) -> ReadEnd:
        """Run a completion step, record its duration, and turn an exception into a failed end."""
        code, counter = _FAILURES[step]
        began_s = time.perf_counter()
        try:
            action()
        except Exception as error:  # noqa: BLE001  (the request fails, the engine goes on)
            self._recorder.trouble(f"completion of a read ({step})", error, f"request {end.order.request_id}")
            self._recorder.count(counter)
            return replace(end, code=code, message=f"{type(error).__name__}: {error}")
        self._recorder.observe(f"{step}_duration", time.perf_counter() - began_s)
        return end
