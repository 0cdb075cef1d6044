"""Hand-overs on paper of the slowest rank of a survey, over a fresh and a fragmented pool, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kv_topology._tools._hand_over import Load, estimate
from kv_topology._tools._report import Page, rank_name

if TYPE_CHECKING:
    from kv_topology._tools._hand_over import HandOver, HandOverModel
    from kv_topology._tools._survey import Survey

    Rank = tuple[int, int]

__all__ = ["hand_over_json", "hand_over_page", "hand_overs"]


def hand_overs(found: Survey, model: HandOverModel) -> tuple[Rank, dict[str, tuple[HandOver, HandOver]]]:
    """Return the slowest consumer rank, and its plain and streamed hand-over by kind of pool.

    Blocks of a fresh pool lie one behind the other and are one run in each region; of a fragmented one each is read alone.
    """
    rank = max(found.plans, key=lambda each: (found.transfer_ms(found.plans[each]), each))
    plan, cost = found.plans[rank], found.run.cost
    per_token = found.descriptors_per_token(plan)
    moved = plan.estimate.bytes_per_token * cost.prompt_tokens
    states = Load(plan.estimate.state_bytes, plan.estimate.state_descriptors)
    readers = max(
        sum(producer in each.producer_ranks for each in found.plans.values()) for producer in plan.producer_ranks
    )
    descriptors = {
        "fresh": min(per_token * found.run.consumer.block_tokens, per_token * cost.prompt_tokens),
        "fragmented": per_token * cost.prompt_tokens,
    }
    return rank, {
        pool: estimate(model, cost, Load(moved, count), states, readers) for pool, count in descriptors.items()
    }


def hand_over_page(found: Survey, model: HandOverModel) -> Page:
    """Return the times that plain and streamed hand-overs take."""
    rank, pools = hand_overs(found, model)
    columns = [
        ("pool", -10),
        ("hand-over", -9),
        ("after prefill", 13),
        ("first token", 12),
        ("early", 6),
        ("in flight", 10),
        ("producer holds", 14),
        ("consumer holds", 14),
        ("looks/s", 8),
    ]
    rows = [_cells(pool, each) for pool, both in pools.items() for each in both]
    assumed = f"{model.prefill_tokens_s:g} tokens/s in steps of {model.chunk_tokens}, decode steps of {model.decode_step_ms:g} ms"
    tail = [
        "",
        f"rank {rank_name(rank)}, {found.run.cost.prompt_tokens} tokens; assumed, not measured: {assumed}",
        f"looks/s: at most, at a producer rank with {model.stream_slots} streams to {model.peers} peers",
    ]
    return Page([""], columns, rows, tail)


def _cells(pool: str, each: HandOver) -> list[str]:
    return [
        pool,
        each.way,
        f"{each.wait_ms:.1f} ms",
        f"{each.first_token_ms / 1e3:.2f} s",
        f"{100 * each.early_share:.1f}%",
        f"{each.most_in_flight_bytes / 1e9:.2f} GB",
        f"{each.producer_hold_ms:.1f} ms",
        f"{each.consumer_hold_ms / 1e3:.2f} s",
        f"{each.looks_per_s:.0f}",
    ]


def hand_over_json(found: Survey, model: HandOverModel) -> dict[str, object]:
    """Return plain and streamed hand-overs in plain values, with the prices."""
    rank, pools = hand_overs(found, model)
    ways = [{"pool": pool, **asdict(each)} for pool, both in pools.items() for each in both]
    return {"consumer_rank": list(rank), "model": asdict(model), "hand_overs": ways}
