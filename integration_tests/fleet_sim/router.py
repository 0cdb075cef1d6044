"""The router and its clients: prompts to prefill, tickets to decode, answers; aborts and damaged tickets on the way."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from host import Request
from plan import RequestPlan

from vllm_adapter.wiring import prefill_request_params

if TYPE_CHECKING:
    from engine import Engine
    from fleet import Fleet

Ticket = dict[str, Any]
DAMAGES: dict[str, Callable[[Ticket, random.Random, list[Mapping[str, object]]], Mapping[str, object]]] = {
    "blocks": lambda ticket, draw, _: {
        "remote_block_ids": [[1 + draw.randrange(20) for _ in group] for group in ticket["remote_block_ids"]]
    },
    "tokens": lambda ticket, draw, _: {
        "remote_num_tokens": max(1, ticket["remote_num_tokens"] + draw.choice((-5, 5, 1000)))
    },
    "first-tokens": lambda ticket, draw, _: {
        "kv_first_tokens": [first + draw.choice((-8, 8, 16)) for first in ticket["kv_first_tokens"]]
    },
    "fence": lambda _, draw, _others: {"kv_fence": [draw.randrange(8), draw.getrandbits(52)]},
    "nonce": lambda _, draw, _others: {"kv_nonce": f"{draw.getrandbits(64):016x}"},
    "engine": lambda _, draw, _others: {"remote_engine_id": draw.choice(("nobody", "P0", "D1", ""))},
    "port": lambda _, draw, _others: {"remote_port": draw.choice((5600, 5601, 9, 70000, -1))},
    "request": lambda _, draw, others: dict(
        item for item in draw.choice(others).items() if item[0] in {"remote_request_id", "remote_block_ids"}
    ),
    "sizes": lambda _, draw, _others: {"tp_size": draw.choice((1, 2, 4, 8, 0, 1 << 40))},
    "prompt": lambda _, draw, _others: {"kv_prompt": f"{draw.getrandbits(256):064x}"},
    "types": lambda ticket, draw, _: {
        draw.choice(sorted(ticket)): draw.choice((None, "x", -1, [], {}, 1 << 60, [[[]]], True))
    },
    "generation": lambda _, draw, _others: {"kv_generation": draw.randrange(100)},
    "lease": lambda _, draw, _others: {"kv_lease_s": draw.choice((0, -1, 1e9, 0.001))},
    "span": lambda ticket, _, _others: {"kv_span_tokens": [span * 2 for span in ticket["kv_span_tokens"]]},
    "foreign": lambda _, draw, others: draw.choice(others),
}
"""Parts of a ticket that a hostile client changes."""

_BLIND = frozenset(("blocks", "tokens", "first-tokens", "request", "span", "fence"))
"""Changes that only a seal can notice."""


@final
class Router:
    """All conversations of an episode."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.world = fleet.world
        self._open: dict[str, int] = {}
        self._at: dict[int, tuple[int, Request]] = {}
        self._sent = 0
        self._tickets: list[Mapping[str, object]] = []
        self._plans: dict[str, RequestPlan] = {}
        self._prompts: dict[str, list[int]] = {}
        self._repeats = 0

    def open_names(self) -> list[str]:
        """Return requests without an answer."""
        return list(self._open)

    def start(self, plan: RequestPlan) -> None:
        """Begin a conversation at its time."""
        self._open[plan.name] = plan.turns * plan.readers + bool(plan.again)
        if plan.early:
            self._open[plan.name] = 2
            self._plans[plan.name] = plan
            self.world.after(plan.at_s, lambda: self._together(plan, self._prompt(plan), self._hand_over_id(plan.name)))
            return
        self.world.after(plan.at_s, lambda: self._prefill(plan, 1, self._prompt(plan), None))

    def _prompt(self, plan: RequestPlan) -> list[int]:
        shared = self.fleet.family_ids(plan.family, min(plan.family_tokens, plan.tokens)) if plan.family_tokens else []
        own = plan.tokens - len(shared)
        return shared + (self.fleet.new_ids(plan.name, own) if own else [])

    # ------------------------------------------------------------------------------------------------------ stages

    def _prefill(self, plan: RequestPlan, turn: int, ids: list[int], readback: Mapping[str, object] | None) -> None:
        params: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
        if readback is not None:
            params = dict(readback)
        name = f"{plan.name}-p{turn}"

        def answered(outcome: str, ticket: Mapping[str, object] | None, _: list[int]) -> None:
            if turn == 1 and (plan.again == "leased" or (plan.again == "end" and outcome != "done")):
                self._again(plan, ids)
            if outcome != "done":
                self._end(name, plan, (plan.turns - turn + 1) * plan.readers, outcome)
                return
            for reader in range(plan.readers):
                self.world.after(
                    plan.router_s * (1 + reader / 4), partial(self._decode, plan, turn, reader, ids, ticket)
                )

        # vLLM's prefill generates one token, which decode computes again.
        self._send(plan.prefill, name, ids, len(ids) + 1, params, answered, plan)
        if plan.abort == "prefill" or (turn == 1 and plan.again == "abort"):
            self._abort_later(plan.prefill, name, plan.abort_s)
        if turn == 1 and plan.again == "abort":
            self.world.after(plan.abort_s + 2 * self.fleet.network.base_s, lambda: self._again(plan, ids))

    # ------------------------------------------------------------------------------------------------------ both at once

    def _hand_over_id(self, name: str) -> str:
        return f"{self.world.random(f'hand-over {name}').getrandbits(128):032x}"

    def _together(self, plan: RequestPlan, ids: list[int], hand_over_id: str, suffix: str = "") -> None:
        """Send a prompt to both engines at once, or to one of them a little later."""
        host, port = self.fleet.place(plan.prefill)
        secret = os.environ["SIM_FLEET_SECRET"].encode() if self.fleet.is_sealed else None
        prefill = prefill_request_params((hand_over_id, host, port), secret=secret)
        decode = {"do_remote_prefill": True, "do_remote_decode": False, "kv_stream": prefill["kv_stream"]}
        self._prompts.setdefault(plan.name, ids)
        names = f"{plan.name}-p1{suffix}", f"{plan.name}-d1{suffix}"

        def send(number: int, slot: int, most: int, params: Mapping[str, object]) -> None:
            def answered(outcome: str, _ticket: object, _ids: list[int]) -> None:
                self._end(names[number], plan, 1, outcome)

            self._send(slot, names[number], ids, most, params, answered, plan, hand_over_id)

        later = {"prefill": 1, "decode": 0}.get(plan.early)
        calls = [
            partial(send, 0, plan.prefill, len(ids) + plan.prefill_tokens, prefill),
            partial(send, 1, plan.decode, len(ids) + plan.new_tokens, decode),
        ]
        for number, call in enumerate(calls):
            if number == later:
                self.world.after(plan.router_s, call)
            else:
                call()

    def same_id(self, name: str, *, is_other: bool) -> None:
        """Send a hand-over under the id of an earlier one, of the same prompt or of another one."""
        plan, ids = self._plans.get(name), self._prompts.get(name)
        if plan is None or ids is None:
            return
        self._repeats += 1
        ids = self.fleet.new_ids(f"{name} again", len(ids)) if is_other else ids
        self._open[name] = self._open.get(name, 0) + 2
        self._together(plan, ids, self._hand_over_id(name), f".{self._repeats}")

    def _again(self, plan: RequestPlan, ids: list[int]) -> None:
        """Send a conversation's first turn once more, under the ids of the first time."""
        self.fleet.fault(f"id-again-{plan.again}")
        self._prefill(replace(plan, again="", abort="", turns=1, readers=1), 1, ids, None)

    def _decode(
        self, plan: RequestPlan, turn: int, reader: int, ids: list[int], ticket: Mapping[str, object] | None
    ) -> None:
        name = f"{plan.name}-d{turn}" + (f".{reader}" if reader else "")
        params = None if ticket is None else self._carried(ticket, plan)

        def answered(outcome: str, readback: Mapping[str, object] | None, all_ids: list[int]) -> None:
            if turn == 1 and not reader and plan.again == "end":
                self._again(plan, ids)
            if reader or turn == plan.turns or outcome != "done":
                left = 1 if reader or outcome == "done" else (plan.turns - turn) * plan.readers + 1
                self._end(name, plan, left, outcome)
                return
            self._end(name, plan, 1, outcome)
            more = 3 + turn if plan.turn_tokens < 0 else plan.turn_tokens
            longer = all_ids + (self.fleet.new_ids(plan.name, more) if more else [])
            self.world.after(plan.router_s, lambda: self._prefill(plan, turn + 1, longer, readback))

        self._send(plan.decode, name, ids, len(ids) + plan.new_tokens, params, answered, plan)
        if plan.abort == "decode":
            self._abort_later(plan.decode, name, plan.abort_s)

    def _send(
        self,
        slot: int,
        name: str,
        ids: list[int],
        most: int,
        params: Any,
        answered: Any,
        plan: RequestPlan,
        hand_over_id: str = "",
    ) -> None:
        lane = self.fleet.lane(slot)
        delay_s = self.fleet.network.delay_s("router", lane, "http")
        self._sent += 1
        number, sent_s = self._sent, self.world.time_s
        self.world.note("router", name, lane, self.world.time_s + delay_s)

        def answer(outcome: str, ticket: Mapping[str, object] | None, all_ids: list[int]) -> None:
            self._at.pop(number, None)
            took_s, most_s = self.world.time_s - sent_s, self.fleet.plan.fleet.answer_s
            if most_s and took_s > most_s:
                self.world.violated("deadlock", f"{name} was answered after {took_s:.1f} s, and nothing was wrong")
            back_s = self.fleet.network.delay_s(lane, "router", "http")
            self.world.note(lane, f"{name}: {outcome}", "router", self.world.time_s + back_s)
            self.world.after(back_s, lambda: answered(outcome, ticket, all_ids))

        request = Request(name, list(ids), len(ids), most, params, answer, lambda: self.fleet.new_ids(plan.name, 1)[0])
        request.hand_over_id, request.is_producer = hand_over_id, slot == plan.prefill

        def arrives() -> None:
            engine = self.fleet.engine(slot)
            if engine is None or engine.process.is_dead:
                answer("engine-down", None, ids)
                return
            self._at[number] = slot, request
            self.world.after(0.0, lambda: engine.host.arrive(request), engine.process)

        self.world.after(delay_s, arrives)

    def _abort_later(self, slot: int, name: str, delay_s: float) -> None:
        def abort() -> None:
            engine = self.fleet.engine(slot)
            if engine is not None and not engine.process.is_dead:
                self.fleet.fault("abort")
                self.world.after(0.0, lambda: engine.host.abort(name), engine.process)

        self.world.after(delay_s + self.fleet.network.base_s, abort)

    def engine_died(self, engine: Engine) -> None:
        """End all requests that a dead engine held: their connections are gone."""
        for _, (slot, request) in list(self._at.items()):
            if slot == engine.slot and not request.is_answered:
                request.is_answered = True
                request.answer("engine-died", None, request.ids)

    def _end(self, name: str, plan: RequestPlan, parts: int, outcome: str) -> None:
        self.world.counts[f"outcome {outcome}"] += 1
        left = self._open.get(plan.name, 0) - parts
        if left < 0:
            self.world.violated("answered-twice", f"{name} ends, but its conversation is over")
        if left <= 0:
            self._open.pop(plan.name, None)
        else:
            self._open[plan.name] = left

    # ------------------------------------------------------------------------------------------------------ tickets

    def _carried(self, ticket: Mapping[str, object], plan: RequestPlan) -> dict[str, Any]:
        """Return a ticket as it comes out of the router: through JSON read into doubles, and changed if the client is hostile."""
        carried: dict[str, Any] = json.loads(json.dumps(ticket), parse_int=lambda text: int(float(text)))
        self._tickets.append(carried)
        if plan.damage and (self.fleet.is_sealed or plan.damage not in _BLIND):
            self.fleet.fault(f"ticket-{plan.damage}")
            if plan.damage == "no-fence":
                return {name: value for name, value in carried.items() if name != "kv_fence"}
            draw = self.world.random(f"damage {plan.name}")
            return {**carried, **DAMAGES[plan.damage](carried, draw, self._tickets)}
        return carried
