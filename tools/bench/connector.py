"""Speed of hand-overs between real vLLM engines on CPU: pairs with our connector, plain and streamed, and with vLLM's own.

All engines are up at once, and all but one pair are stopped (SIGSTOP) while that one is measured: the worker of vLLM's own
connector polls, and would take a core from the others. The order turns round by round. The model has 131 072 bytes of cache a
token and little to compute. Every answer is compared with that of an engine that computes the same prompt alone.

A hand-over lasts from the prefill engine's answer, as the demo router sees it, to the decode engine's first token at the client.
Rows with a target are gates: figure (`ratio`), bound and verdict (`met`). A bound that nothing was measured for is not met.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from kvdev.engines import local_model
from kvdev.envs import DEFAULT_VLLM
from kvdev.forked import started_starter
from kvdev.pairs.figures import rows_of, unjudged
from kvdev.pairs.plan import PREFIX, Size, plan_of
from kvdev.pairs.running import carry_out
from kvdev.steps import fail

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SIZES", "run"]

SIZES = get_args(Size)
"""Sizes of a run that `dev.py bench` knows."""


def run(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure what the plan says; medians of alternating rounds."""
    signal.signal(signal.SIGTERM, _end)
    size = os.environ.get(f"{PREFIX}SIZE", "quick")
    if size not in SIZES:
        fail(f"{PREFIX}SIZE: {' or '.join(SIZES)}, not {size!r}")
    plan = plan_of(cast("Size", size), os.environ)
    python, model = local_model(Path(os.environ["KVDEV_UV"]), "fat", DEFAULT_VLLM)
    with started_starter(python) as starter:
        book = carry_out(plan, starter, python, model, report)
    rows = rows_of(book, plan.kinds)
    return rows if size == "quick" else [*rows, *unjudged(rows)]


def _end(_number: int, _frame: object) -> None:
    """Unwind at a SIGTERM, so that engines, stopped ones too, and routers are ended."""
    raise SystemExit(1)
