"""Hand-overs between vLLM's engine cores without a model: ours beside vLLM's own connector, interleaved (`_engine_cores.py`).

`own` is vLLM's `NixlConnector` with NIXL's progress thread asleep for 50 ms between turns, as on a host with cores to spare: as
it ships the thread takes its engine's core. Steps in flight: 1 is `EngineCore.step`, the default on CPU; 2 is
`step_with_batch_queue`, which asynchronous scheduling runs by default on GPUs.

A hand-over lasts from the ticket in the decode engine's input queue to the first token in its output queue. Its floor is a bare
read of the same descriptors by NIXL and a plain prompt of 16 tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from _rows import row

from kvdev.envs import DEFAULT_VLLM, host_environment
from kvdev.gpu import cuda_host
from kvdev.paths import ROOT
from kvdev.steps import DevError, note

IN_FLIGHT = (1, 2)
ROUNDS = 30
SHIPPED_ROUNDS = 10
BLOCKS = (1, 16, 64, 1024)
"""Of 32 tokens and 4 pages of 8 KiB: 32 KiB to 32 MiB a hand-over."""
JUDGED = (1, 16, 64)
AT_ONCE = (4, 16)
PROMPT_BLOCKS = 8
"""Of each prompt of those at once and beside another request: 256 tokens less five."""
BESIDE_S = 0.005
"""A step of a request beside."""
APART = {"worker apart, 1 prompt": (1, 1, 0.0), "worker apart, 4 prompts": (PROMPT_BLOCKS, 4, 0.0)}
"""With the executor of engines of several ranks, whose workers are processes of their own."""
LIVE = 1000
REST_S = 3.0
PHASES = ("queued", "order", "posted", "data there", "fence held", "result", "taken in", "runs", "token")

Stamps = Iterable[tuple[str, str, float]]
"""Stage, request and moment in seconds, as `_engine_cores.py` prints them."""
Samples = Mapping[tuple[str, str], Sequence[Any]]
"""Stamps of each measurement, or seconds, by kind of pair and case."""


def run(*, vllm: str = DEFAULT_VLLM) -> Iterator[dict[str, Any]]:
    """Yield a row per figure: medians, and p90 and p99 of the whole."""
    python = cuda_host()[0] or host_environment(Path(os.environ["KVDEV_UV"]), vllm)
    cases = {f"one {blocks}": (blocks, 1, 0.0) for blocks in BLOCKS}
    cases |= {f"many {count}": (PROMPT_BLOCKS, count, 0.0) for count in AT_ONCE}
    cases["beside"] = (PROMPT_BLOCKS, 1, BESIDE_S)
    plan: dict[str, Any] = {"rounds": ROUNDS, "live": LIVE, "rest_s": REST_S, "most_tokens": 32 * max(*BLOCKS, 128)}
    for in_flight in IN_FLIGHT:
        place = f"{in_flight} in flight"
        note(place)
        plan |= {"in_flight": in_flight, "executor": "uni", "cases": cases, "shipped_rounds": SHIPPED_ROUNDS}
        yield from rows_of(_measured(python, plan), place)
        samples = _measured(python, plan | {"executor": "mp", "cases": APART, "shipped_rounds": 0, "live": 1})
        for case in APART:
            yield from compared(samples, place, f"queued > first token, {case}", case, WHOLE_MS, "<= 0.95", "<= 1")


def _measured(python: Path, plan: Mapping[str, Any]) -> Samples:
    command = [str(python), str(Path(__file__).with_name("_engine_cores.py")), json.dumps(plan)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "KV_TRANSFER_"))}
    environment |= {"PYTHONPATH": str(ROOT / "tools"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise DevError(f"the engine cores ended with {ended.returncode}:\n{ended.stderr[-6000:]}")
    samples = defaultdict[tuple[str, str], list[Any]](list)
    for line in ended.stdout.splitlines():
        kind, case, value = json.loads(line)
        samples[kind, case].append(value)
    return samples


# --------------------------------------------------------------------------------------------------------------- arithmetic


def moments(stamps: Stamps) -> dict[str, dict[str, float]]:
    """Return by request, but for one beside, the first moment of each stage.

    Transfers bear no request's name: of a hand-over alone `posted` is the first post after its order, `data there` the first end
    of a transfer, and `fence held` the last one before its result.
    """
    stamps, found = list(stamps), defaultdict[str, dict[str, float]](dict)
    for stage, name, moment_s in stamps:
        if name and not name.startswith("beside"):
            found[name].setdefault(stage, moment_s)
    for each in found.values() if len(found) == 1 else ():
        for stage, event, place in (("posted", "post", 0), ("data there", "done", 0), ("fence held", "done", -1)):
            if "order" in each:
                within = [at for one, _, at in stamps if one == event and each["order"] <= at <= each["result"]]
                each[stage] = within[place]
    return found


def spans_ms(samples: Iterable[Stamps], first: str, last: str) -> list[float]:
    """Return by sample the milliseconds from the first moment of a stage to the last one of another, over its requests."""
    each = [moments(stamps).values() for stamps in samples]
    return [1e3 * (max(one[last] for one in of) - min(one[first] for one in of)) for of in each]


def gaps_ms(samples: Iterable[Stamps]) -> list[float]:
    """Return by sample the longest gap between tokens of a request beside, from the last one before the ticket was queued on."""
    gaps: list[float] = []
    for stamps in map(list, samples):
        (queued_s,) = (one["queued"] for one in moments(stamps).values())
        times = [at for stage, name, at in stamps if stage == "token" and name.startswith("beside")]
        gaps.append(max(1e3 * (late - early) for early, late in pairwise(times) if late > queued_s))
    return gaps


def steps_ms(samples: Iterable[Stamps]) -> list[float]:
    """Return the CPU milliseconds of the engine's thread in steps of all live requests: all but the first and the last."""
    steps = [[cpu_s for stage, _, cpu_s in stamps if stage == "step"][1:-1] for stamps in samples]
    return [1e3 * cpu_s for each in steps for cpu_s in each]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of them lie, between two of them in proportion: 0.9 of 1, 2, 3 is 2.8."""
    place, ordered = share * (len(values) - 1), sorted(values)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


# -------------------------------------------------------------------------------------------------------------------- rows


WHOLE_MS = partial(spans_ms, first="queued", last="token")


def compared(
    samples: Samples, place: str, name: str, case: str, of: Callable[..., Any], *targets: str, other: str = "own"
) -> Iterator[dict[str, Any]]:
    """Yield the median with its target, and further quantiles where there are more targets."""
    shares = (0.5, 0.9, 0.99)[: len(targets)] or (0.5,)
    ours, others = (of(samples[kind, case]) for kind in ("ours", other))
    for share, target in zip(shares, targets or ("context",), strict=True):
        about = f"{name}, {place}" + (f", p{100 * share:.0f}" if share != 0.5 else "")
        yield row(about, "ms", quantile(ours, share), quantile(others, share), target)


def rows_of(samples: Samples, place: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of what was measured with so many steps in flight."""
    plain_ms = quantile(WHOLE_MS(samples["own", "plain"]), 0.5)
    of = partial(compared, samples, place)
    for blocks in BLOCKS:
        case, about = f"one {blocks}", f"{blocks} blocks"
        bounds = ("<= 0.95", "<= 1", "context") if blocks in JUDGED else ("context",) * 3
        yield from of(f"queued > first token, {about}", case, WHOLE_MS, *bounds)
        (bare_s,) = samples["own", f"bare {blocks}"]
        ours_ms, floor_ms = quantile(WHOLE_MS(samples["ours", case]), 0.5), 1e3 * quantile(bare_s, 0.5) + plain_ms
        yield row(f"queued > first token beside the floor, {about}, {place}", "ms", ours_ms, floor_ms)
        yield from of(f"queued > freed, {about}", case, partial(spans_ms, first="queued", last="freed"), "<= 1")
        yield from of(f"result > freed, {about}", case, partial(spans_ms, first="result", last="freed"), "<= 1")
        for first, last in pairwise(PHASES):
            yield from of(f"{first} > {last}, {about}", case, partial(spans_ms, first=first, last=last))
    for count in AT_ONCE:
        yield from of(f"last first token of {count} prompts", f"many {count}", WHOLE_MS, "<= 0.95", "context")
    yield from of("longest gap of a request beside", "beside", gaps_ms, "<= 1", "<= 1", "context")
    yield from of(f"step of {LIVE} plain requests", "live", steps_ms, "<= 1")
    yield from of("queued > first token beside a request", "beside", WHOLE_MS, "<= 0.95", "<= 1", "context")
    if ("shipped", "rest") in samples:
        yield from of("queued > first token beside own as it ships, 1 block", "one 1", WHOLE_MS, other="shipped")
        for other, beside, bound in (("shipped", "own as it ships", "<= 0.05"), ("none", "no connector", "<= 1.2")):
            yield from of(
                f"CPU a second at rest beside {beside}",
                "rest",
                lambda of: [1e3 * share for share in of],
                bound,
                other=other,
            )
