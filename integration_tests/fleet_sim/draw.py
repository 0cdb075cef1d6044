"""Draw an episode's plan from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from draw_world import PARTS, parts_of
from faults import KINDS
from network import LINK_KINDS
from plan import EnginePlan, EpisodePlan, FaultPlan, FleetPlan, GroupPlan, RequestPlan
from router import DAMAGES

_CALM_PART = 0.15
_FEW_SLOTS_PART = 0.06
_BAD_NEIGHBOUR_PART = 0.05
_SHORT_TTL_PART = 0.15
_NO_FENCE_PART = 0.02
_AIMED_PART = 0.6
_LONGEST_TOKENS = 80
"""No conversation grows beyond this, so that every request fits into an engine that has nothing else to do."""


def draw_plan(seed: int) -> EpisodePlan:
    """Return the plan of a seed."""
    return parts_of(plain_plan(seed), PARTS)


def plain_plan(seed: int) -> EpisodePlan:
    """Return a plan with attention groups and nothing else."""
    draw = random.Random(seed)
    if draw.random() < _CALM_PART:
        return _tried(_calm(draw, seed))
    if random.Random(f"{seed}/slots").random() < _FEW_SLOTS_PART:
        return _few_slots(draw, seed)
    if random.Random(f"{seed}/neighbour").random() < _BAD_NEIGHBOUR_PART:
        return _bad_neighbour(draw, seed)
    fleet = _fleet(draw)
    requests = tuple(_request(draw, fleet, number) for number in range(draw.randint(2, 10)))
    count = 0 if draw.random() < 0.15 else draw.randint(1, 6)
    faults = tuple(sorted((_fault(draw, fleet, requests) for _ in range(count)), key=lambda fault: fault.at_s))
    if random.Random(f"{seed}/ttl").random() < _SHORT_TTL_PART:
        fleet = replace(fleet, engine_ttl_s=0.5)
    if random.Random(f"{seed}/no-fence").random() < _NO_FENCE_PART:
        requests = (replace(requests[0], damage="no-fence"), *requests[1:])
    return EpisodePlan(seed, fleet, requests, faults)


def _calm(draw: random.Random, seed: int) -> EpisodePlan:
    """Return a plan without faults or aborts, in which every read must succeed; some take longer than a lease."""
    fleet = replace(
        _fleet(draw),
        is_calm=True,
        is_bidirectional=False,  # a readback's lease is never renewed, and slow reads outlast it
        lease_s=1.0,
        read_timeout_s=300.0,
        handshake_timeout_s=10.0,
        fence_slots=draw.choice((2, 4, 64)),
        max_leases=0,
        max_leased_blocks=0,
        bytes_per_s=draw.choice((8e2, 2e3, 1e6)),
        base_latency_s=draw.choice((0.0005, 0.003)),
        faults_end_s=2.0,
    )
    roomy = replace(fleet, engines=tuple(replace(engine, blocks=400, clock_rate=1.0) for engine in fleet.engines))
    requests = [_request(draw, roomy, number) for number in range(draw.randint(2, 5))]
    strangers = [FaultPlan("forged", draw.uniform(0.0, 2.5), 0.0, draw.randrange(len(roomy.engines))) for _ in range(6)]
    return EpisodePlan(
        seed,
        roomy,
        tuple(replace(one, abort="", damage="", readers=1, router_s=0.01, turns=1) for one in requests),
        tuple(strangers) if draw.random() < 0.5 else (),
    )


def _tried(plan: EpisodePlan) -> EpisodePlan:
    """Return a calm plan, perhaps with a trial that no read may fail by.

    A prefill engine, or its transfer threads alone, stand still for longer than a lease, a connection ends once, two requests of
    an engine share a ticket.
    """
    draw = random.Random(f"{plan.seed}/trial")
    trial = draw.choice(("", "pause", "starve", "blip", "siblings"))
    aim = draw.choice(plan.requests)
    at_s = aim.at_s + draw.uniform(0.05, 1.0)
    if trial in {"pause", "starve"}:
        longest_s = 3.0 if trial == "pause" else 1.5
        pause = FaultPlan(trial, at_s, draw.uniform(0.2, longest_s), aim.prefill)
        return replace(plan, faults=(*plan.faults, pause))
    if trial == "blip":
        fleet = replace(plan.fleet, read_retries=1, lease_s=4.0)
        return replace(plan, fleet=fleet, faults=(*plan.faults, FaultPlan("blip", at_s, 0.0, aim.decode, aim.prefill)))
    if trial == "siblings":
        requests = tuple(replace(one, readers=2) if one is aim else one for one in plan.requests)
        return replace(plan, requests=requests)
    return plan


def _few_slots(draw: random.Random, seed: int) -> EpisodePlan:
    """Return a plan in which a fence slot is taken again while a read that it was for is still on the wire.

    Reads are slow, heartbeats are lost, blocks and slots are few: a lease ends by time or by pressure under its read, and the
    next prompt gets its slot before the read has looked at the fence word.
    """
    fleet = _fleet(draw)
    engines = tuple(replace(engine, tp=1, step_s=0.01) for engine in fleet.engines)
    fleet = replace(
        fleet,
        engines=engines,
        fence_slots=draw.choice((1, 1, 2)),
        lease_s=1.0,
        read_timeout_s=8.0,
        max_leases=0,
        max_leased_blocks=0,
        max_inflight_bytes=0,
        bytes_per_s=draw.choice((3e3, 1e4)),
        patience_s=30.0,
        is_bidirectional=False,
        faults_end_s=8.0,
    )
    prefill, decode = 0, next(slot for slot, engine in enumerate(engines) if engine.role == "decode")
    requests = [
        replace(
            _request(draw, fleet, number),
            at_s=0.2 + number * draw.uniform(0.2, 0.6),
            prefill=prefill,
            router_s=0.001,
            tokens=draw.randint(12, 40),
            damage="",
            readers=1,
            turns=1,
        )
        for number in range(draw.randint(4, 9))
    ]
    faults = [
        FaultPlan("slow", 0.1, 7.0, prefill, decode, draw.choice((10.0, 30.0))),
        FaultPlan("loss", 0.1, 7.0, decode, prefill, draw.choice((0.5, 0.9))),
        FaultPlan("pressure", draw.uniform(0.5, 2.0), 4.0, prefill, 0, draw.choice((0.7, 0.9, 1.0))),
    ]
    return EpisodePlan(seed, fleet, tuple(requests), tuple(faults[: draw.choice((1, 2, 3))]))


def _bad_neighbour(draw: random.Random, seed: int) -> EpisodePlan:
    """Return a plan in which one of two prefill engines is in trouble, and one decode engine reads from both."""
    fleet = _fleet(draw)
    roles = "prefill", "prefill", "decode"
    engines = tuple(_engine(draw, role, 4, len(fleet.groups)) for role in roles)
    fleet = replace(
        fleet,
        engines=tuple(replace(engine, blocks=400) for engine in engines),
        max_leases=0,
        max_leased_blocks=0,
        max_inflight_bytes=draw.choice((0, 2000, 2000)),
        bytes_per_s=draw.choice((1e5, 1e7)),
        read_timeout_s=draw.choice((4.0, 8.0)),
        fence_slots=64,
        faults_end_s=7.0,
    )
    requests = tuple(
        replace(_request(draw, fleet, number), at_s=draw.uniform(0.2, 6.0), decode=2, damage="", turns=1)
        for number in range(draw.randint(6, 12))
    )
    kind = draw.choice(("cut", "cut", "slow", "stop", "crash"))
    trouble = FaultPlan(kind, draw.uniform(0.2, 2.0), draw.uniform(2.0, 5.0), 0, 2 if kind in LINK_KINDS else 0, 50.0)
    if kind == "crash":  # some tickets arrive when their engine is dead
        late = draw.randint(1, 3)
        at_s = max(0.0, trouble.at_s - draw.uniform(0.2, 0.4))
        caught = (replace(one, at_s=at_s, prefill=0, router_s=0.5, abort="", tokens=8) for one in requests[:late])
        requests = (*caught, *requests[late:])
    return EpisodePlan(seed, fleet, requests, (trouble,))


def _fleet(draw: random.Random) -> FleetPlan:
    groups = tuple(
        GroupPlan(draw.choice((0, 0, 10, 24)) if number else draw.choice((0, 0, 0, 16)), draw.choice((1, 1, 2)))
        for number in range(draw.choice((1, 1, 2)))
    )
    base_tokens = draw.choice((4, 8))
    prefills, decodes = draw.choice(((1, 1), (1, 1), (1, 2), (2, 1), (2, 2)))
    engines = tuple(
        _engine(draw, role, base_tokens, len(groups))
        for role, count in (("prefill", prefills), ("decode", decodes))
        for _ in range(count)
    )
    is_bidirectional = draw.random() < 0.3
    return FleetPlan(
        groups=groups,
        engines=engines,
        lease_s=draw.choice((1.0, 2.0, 4.0)),
        read_timeout_s=draw.choice((0.5, 1.5, 4.0)),
        handshake_timeout_s=draw.choice((0.3, 1.0)),
        readback_s=draw.choice((2.0, 6.0)),
        read_retries=draw.choice((0, 1, 1)),
        fence_slots=draw.choice((2, 4, 64)),
        max_leases=draw.choice((0, 0, 2)),
        max_leased_blocks=draw.choice((0, 0, 10)),
        max_inflight_bytes=draw.choice((0, 0, 2000)),
        policy=draw.choice(("fail", "recompute")),
        is_bidirectional=is_bidirectional,
        is_sealed=draw.random() < 0.4,
        conversion=draw.choice(("auto", "never")),
        base_latency_s=draw.choice((0.0005, 0.003, 0.02)),
        bytes_per_s=draw.choice((1e4, 1e5, 1e7)),
        blocks_reads_of_stopped=draw.random() < 0.5,
        notice_s=draw.choice((0.05, 1.0)),
        patience_s=draw.choice((0.5, 3.0, 30.0)),
        faults_end_s=draw.uniform(2.0, 7.0),
    )


def _engine(draw: random.Random, role: str, base_tokens: int, groups: int) -> EnginePlan:
    block_tokens = base_tokens * draw.choice((1, 1, 1, 2))
    longest = -(-_LONGEST_TOKENS // block_tokens)
    return EnginePlan(
        role=role,
        tp=draw.choice((1, 1, 1, 2)),
        blocks=1 + groups * draw.choice((longest, longest * 3 // 2, longest * 3)),
        block_tokens=block_tokens,
        order=draw.choice(("HND", "HND", "NHD")),
        has_lag=draw.random() < 0.4,
        step_s=draw.choice((0.01, 0.03)),
        chunk_tokens=draw.choice((8, 16, 64)),
        clock_rate=draw.choice((1.0, 1.0, 0.98, 1.02)),
        clock_offset_s=draw.choice((0.0, 1000.0, 1e6)),
    )


def _request(draw: random.Random, fleet: FleetPlan, number: int) -> RequestPlan:
    prefills = [n for n, engine in enumerate(fleet.engines) if engine.role == "prefill"]
    decodes = [n for n, engine in enumerate(fleet.engines) if engine.role == "decode"]
    abort = draw.choice(("", "", "", "prefill", "decode")) if draw.random() < 0.5 else ""
    return RequestPlan(
        name=f"r{number}",
        at_s=draw.uniform(0.0, fleet.faults_end_s * 0.8),
        prefill=draw.choice(prefills),
        decode=draw.choice(decodes),
        tokens=draw.randint(1, 40),
        new_tokens=draw.randint(1, 6),
        router_s=draw.choice((0.001, 0.02, 0.3)) if draw.random() < 0.9 else draw.uniform(0.5, 1.5) * fleet.lease_s,
        readers=2 if draw.random() < 0.1 else 1,
        abort=abort,
        abort_s=draw.choice((0.0, 0.005, 0.02, 0.06, 0.2, 0.6)) * draw.random(),
        damage=draw.choice(tuple(DAMAGES)) if draw.random() < 0.12 else "",
        turns=draw.choice((1, 2, 3)) if fleet.is_bidirectional else 1,
    )


def _fault(draw: random.Random, fleet: FleetPlan, requests: Sequence[RequestPlan]) -> FaultPlan:
    kind = draw.choice(KINDS)
    at_s = draw.uniform(0.0, fleet.faults_end_s)
    engine = draw.randrange(len(fleet.engines))
    others = [n for n in range(len(fleet.engines)) if n != engine]
    if draw.random() < _AIMED_PART:  # at a request: while it is computed, handed over or read
        aim = draw.choice(requests)
        at_s = min(fleet.faults_end_s, aim.at_s + aim.router_s + draw.random() * 0.4)
        engine, second = draw.sample((aim.prefill, aim.decode), 2)
        others = [second]
    if kind in LINK_KINDS:
        amount = {"slow": draw.choice((5.0, 50.0)), "cut": 0.0}.get(kind, draw.choice((0.1, 0.4)))
        return FaultPlan(kind, at_s, draw.choice((0.3, 1.5, 5.0)) * draw.random(), engine, draw.choice(others), amount)
    if kind == "jump":
        return FaultPlan(kind, at_s, 0.0, engine, 0, draw.choice((0.5, 3.0, 60.0)))
    if kind == "pressure":
        return FaultPlan(kind, at_s, draw.uniform(0.1, 3.0), engine, 0, draw.choice((0.5, 0.9, 1.0)))
    if kind == "pause":
        return FaultPlan(kind, at_s, draw.uniform(0.05, 0.6), engine)
    return FaultPlan(kind, at_s, draw.choice((0.2, 2.0, 6.0)) * draw.random(), engine, draw.randrange(2))
