"""Draw plans of fleets whose prompts are read while they are computed: early tickets, short chunks, faults at every chunk.

The fleet is drawn as any other one; what streams need is put over it. Prompts have 2 to 20 chunks. A fault is aimed at a chunk of
a request, not at a time, so that every boundary meets every kind of fault.

Example: a prompt of 64 tokens in chunks of 8 has the chunks 1 to 8; "crash of the prefill engine, 7 ms after chunk 3".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from draw import plain_plan
from draw_world import PARTS_OF_STREAMS, parts_of, with_engines
from plan import EpisodePlan, FaultPlan, RequestPlan

AIMED = ("abort-at", "crash", "preempt", "reset", "same-id", "sleep", "starve", "stop")
"""Kinds of faults that are aimed at chunks."""
_PAIR_PART = 0.12
_LONGEST_TOKENS = 80


def draw_stream_plan(seed: int) -> EpisodePlan:
    """Return the plan of a seed."""
    plan = plain_plan(seed)
    draw = random.Random(f"{seed}/streams")
    plan = _streamed(draw, plan)
    if draw.random() < _PAIR_PART:
        plan = _pair(draw, plan)
    plan = parts_of(plan, PARTS_OF_STREAMS)
    if plan.fleet.answer_s:
        return replace(plan, faults=())
    # Short chunks, whatever the blocks are.
    plan = with_engines(plan, lambda engine: replace(engine, chunk_tokens=draw.choice((4, 6, 8, 16))))
    if plan.fleet.is_calm:
        return replace(plan, faults=tuple(fault for fault in plan.faults if fault.kind != "siblings"))
    return replace(plan, faults=(*plan.faults, *_aimed(draw, plan)))


def _streamed(draw: random.Random, plan: EpisodePlan) -> EpisodePlan:
    """Let engines stream, most of them, and routers send both requests at once, most of the time."""
    calm = plan.fleet.is_calm
    share = 1.0 if calm else draw.choice((1.0, 1.0, 1.0, 0.7))
    engines = tuple(
        replace(
            engine,
            streams=draw.random() < share,
            has_device=draw.random() < 0.6,
            applies_late=draw.random() < 0.7,
            # A device that lags behind its scheduler, where chunks end long after they are ordered.
            step_s=draw.choice((engine.step_s, engine.step_s, 0.03, 0.06)),
        )
        for engine in plan.fleet.engines
    )
    fleet = replace(
        plan.fleet,
        engines=engines,
        is_bidirectional=False,
        engine_ttl_s=0.0,
        stream_slots=draw.choice((1, 2, 4, 16)),
        stream_fraction=1.0 if calm else draw.choice((0.3, 0.5, 0.8, 1.0)),
        ask_wait_s=30.0 if calm else draw.choice((0.3, 1.0, 3.0)),
    )
    requests = tuple(
        replace(
            request,
            early=draw.choice(("both", "both", "prefill", "decode")) if draw.random() < 0.85 else "",
            tokens=draw.randint(8, 64),
            prefill_tokens=1 if calm else draw.choice((1, 1, 1, 3)),
            turns=1,
            readers=1,
            abort="" if calm else request.abort,
            damage="",
            again="",
            router_s=min(request.router_s, 0.3),
        )
        for request in plan.requests
    )
    return replace(plan, fleet=fleet, requests=requests)


def _pair(draw: random.Random, plan: EpisodePlan) -> EpisodePlan:
    """Return two engines that prefill for each other with few blocks, where nothing breaks and nobody may wait for long."""
    groups = len(plan.fleet.groups)
    blocks = 1 + groups * (-(-_LONGEST_TOKENS // 4)) * draw.choice((2, 3))
    engines = tuple(
        replace(
            engine,
            streams=True,
            tp=1,
            block_tokens=4,
            blocks=blocks,
            clock_rate=1.0,
            chunk_tokens=draw.choice((4, 4, 8)),
            step_s=0.03,
        )
        for engine in plan.fleet.engines
    )
    engines = (engines[0], next(one for one in engines if one.role == "decode"))
    requests = tuple(
        replace(
            plan.requests[number % len(plan.requests)],
            name=f"r{number}",
            at_s=0.1 + draw.random() * 0.02,
            prefill=number % 2,
            decode=1 - number % 2,
            tokens=draw.randint(48, 64),
            early="both",
            abort="",
            damage="",
        )
        for number in range(draw.randint(4, 8))
    )
    fleet = replace(
        plan.fleet,
        engines=engines,
        is_calm=False,
        answer_s=15.0,
        stream_fraction=draw.choice((0.3, 0.5)),
        stream_slots=16,
        ask_wait_s=3.0,
        read_timeout_s=30.0,
        handshake_timeout_s=10.0,
        lease_s=4.0,
        max_leases=0,
        max_leased_blocks=0,
        fence_slots=64,
        bytes_per_s=1e6,
        base_latency_s=0.0005,
        faults_end_s=2.0,
    )
    return EpisodePlan(plan.seed, fleet, requests, ())


def _aimed(draw: random.Random, plan: EpisodePlan) -> Sequence[FaultPlan]:
    """Return faults at chunks of early requests."""
    found: list[FaultPlan] = []
    for request in plan.requests:
        if request.early and draw.random() < 0.6:
            found += [_fault(draw, plan, request) for _ in range(draw.choice((1, 1, 2, 3)))]
            if found[-1].kind == "preempt" and draw.random() < 0.4:  # unseen, since the reader looks away just then
                away = replace(found[-1], kind="starve", engine=request.decode, duration_s=draw.uniform(0.05, 0.3))
                found.append(away)
    return found


def _fault(draw: random.Random, plan: EpisodePlan, request: RequestPlan) -> FaultPlan:
    kind = draw.choice((*AIMED, "abort-at", "preempt", "preempt", "preempt"))
    engine = plan.fleet.engines[request.prefill]
    chunks = -(-request.tokens // engine.chunk_tokens)
    chunk = draw.choice((0, draw.randint(1, chunks)))
    after_s = draw.choice((0.0, 0.0, draw.random() * engine.step_s, draw.random() * 4 * engine.step_s))
    is_decode = draw.random() < 0.4
    second = draw.randrange(2)
    slot = request.prefill
    if kind == "abort-at":
        second, slot = int(is_decode), request.decode if is_decode else request.prefill
    elif kind in {"crash", "reset", "sleep", "starve", "stop"} and is_decode:
        slot = request.decode
    duration_s = draw.choice((0.05, 0.3, 2.0)) * draw.random()
    return FaultPlan(kind, after_s, duration_s, slot, second, 0.0, request.name, chunk)
