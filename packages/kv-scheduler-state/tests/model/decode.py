"""A minimal decode engine: scheduler, reading ranks, parked requests, and an observer of all of them.

Like a real engine, it dies on nonsense: an id is only accepted as received while its request is parked, or was
aborted while parked. The peer is a `PrefillSide`, or `GenerousPeer`, which always serves and so lets the decode
side be explored alone.
"""

from __future__ import annotations

from typing import Final

from kv_scheduler_state import UNBOUND
from kv_scheduler_state.config import GroupConfig, SchedulerConfig
from kv_scheduler_state.plan import StepPlan
from kv_scheduler_state.records import Request
from kv_scheduler_state.scheduler.state import SchedulerState
from kv_scheduler_state.values import FinishReason

from .invariants import problems
from .prefill import HEARTBEAT_S, LEASE_S, PrefillSide
from .promises import Step, demand

_REASONS: Final[dict[str, FinishReason]] = {"d-finish": "stop", "d-abort": "abort", "d-fail": "error"}
_WANTS_LEASE: Final = frozenset(("waiting", "parked"))


class GenerousPeer:
    """A peer that has every prompt and keeps it for ever."""

    def __init__(self, readers: int) -> None:
        self.readers = tuple(f"reader-{rank}" for rank in range(readers))

    def ticket(self, request_id: str) -> dict[str, object] | None:
        """Return a ticket with three blocks."""
        return {
            "do_remote_prefill": True,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": "prefill-0",
            "remote_request_id": request_id,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "kv_fence": [0, 7],  # without one, any end that is reported to it would use the ticket up
        }

    def notify(self, request_id: str, reader: str, now_s: float) -> None:
        """Ignore it."""

    def renew(self, request_id: str, now_s: float) -> None:
        """Ignore it."""

    def is_fence_intact(self, request_id: str) -> bool:
        """Return True."""
        return bool(request_id)

    def is_freed(self, request_id: str) -> bool:
        """Return False."""
        return not request_id


class Answer:
    """The engine's and the observer's knowledge of one request."""

    def __init__(self, readers: int) -> None:
        self.status = "absent"
        self.preemptions = 0
        self.orders = 0
        self.is_notified = False
        # Whether its read has used the ticket up, or will pass it on when it is quiet.
        self.is_over = False
        # Whether its read has ended well, so that no other request reads the ticket any more.
        self.is_read = False
        self.is_passed = False
        # Whether no other request wanted the hand-over when this request gave it up.
        self.may_tell = True
        self.ranks = ["idle"] * readers
        self.in_flight: frozenset[int] = frozenset()
        self.beaten_s: float | None = None


class DecodeSide:
    """A decode engine whose ranks read `requests` requests from one peer."""

    def __init__(
        self,
        peer: PrefillSide | GenerousPeer,
        *,
        requests: int,
        fails_requests: bool = False,
        is_shared: bool = False,
        adversity: int = 1,
    ) -> None:
        self.state = SchedulerState(
            SchedulerConfig(
                "decode-0",
                "10.0.0.2",
                5600,
                groups=(GroupConfig(),),
                lease_s=LEASE_S,
                heartbeat_s=HEARTBEAT_S,
                fence_seed=1,
                nonce_seed="n",
                load_failure_policy="fail" if fails_requests else "recompute",
            )
        )
        self.peer = peer
        self.answers = {f"d{index}": Answer(len(peer.readers)) for index in range(requests)}
        self.fails_requests = fails_requests
        # Whether all requests hold one ticket, like the children of a request with n > 1.
        self.is_shared = is_shared
        self.adversity = adversity

    # ---- what can happen

    def steps(self, now_s: float) -> list[Step]:
        """Return everything that the engine, its ranks and the wire may do now."""
        steps: list[Step] = []
        for request_id, answer in self.answers.items():
            steps += [(name, request_id) for name in self._names(request_id, answer)]
            steps += [("d-deliver", request_id, str(rank)) for rank in sorted(answer.in_flight)]
            for rank, doing in enumerate(answer.ranks):
                if doing == "reading":
                    steps.append(("d-read", request_id, str(rank)))
                    if self.adversity:
                        steps.append(("d-break", request_id, str(rank)))
        if self.state.has_work() or self._is_heartbeat_due(now_s):
            steps.append(("d-step",))
        return steps

    def _names(self, request_id: str, answer: Answer) -> list[str]:
        status = answer.status
        names: list[str] = []
        if status == "absent" and self.peer.ticket(self._peer_id(request_id)) is not None:
            names = ["d-arrive"]
        elif status == "waiting":
            names = ["d-load", "d-hit", "d-abort"] if self._can_load(request_id) else ["d-hit", "d-abort"]
        elif status == "running":
            names = ["d-allocate", "d-finish"]
            if answer.preemptions < self.adversity:
                names.append("d-preempt")
        elif status == "failing":
            names = ["d-allocate", "d-fail"]
        elif status in {"parked", "aborting"}:
            names = ["d-abort"] if status == "parked" else []
            if set(answer.ranks) <= {"ok", "bad"}:
                names.append("d-report")
        if answer.is_notified and self.adversity and not answer.in_flight:
            names.append("d-repeat")
        return names

    def _can_load(self, request_id: str) -> bool:
        """Ask whether a waiting request may be read now, and check the answer."""
        tokens = self.state.external_tokens(request_id, computed_tokens=0)
        others = [answer for name, answer in self.answers.items() if name != request_id] if self.is_shared else []
        is_read = any(answer.status in {"parked", "aborting"} for answer in others)
        is_spent = any(answer.is_over for answer in others)
        wanted = 0 if is_spent else None if is_read else 32
        demand(tokens == wanted, f"{request_id}: {tokens} tokens to load instead of {wanted}")
        return bool(tokens)

    def _peer_id(self, request_id: str) -> str:
        return "p0" if self.is_shared else "p" + request_id[1:]

    def _is_heartbeat_due(self, now_s: float) -> bool:
        return any(
            answer.status in _WANTS_LEASE and (answer.beaten_s is None or now_s - answer.beaten_s >= HEARTBEAT_S)
            for answer in self.answers.values()
        )

    def apply(self, step: Step, now_s: float) -> None:
        """Do one of `steps` and check what can be checked at once."""
        name = step[0]
        if name == "d-step":
            self.obey(self.state.take_step_plan(now_s=now_s), now_s)
        else:
            request_id, answer = step[1], self.answers[step[1]]
            if len(step) > 2:
                self._rank_step(name, request_id, answer, int(step[2]), now_s)
            elif name in {"d-report", "d-repeat"}:
                self._workers_step(name, request_id, answer, now_s)
            else:
                self._request_step(name, request_id, answer, now_s)
        found = problems(self.state)
        demand(not found, "; ".join(found))

    def _request_step(self, name: str, request_id: str, answer: Answer, now_s: float) -> None:
        blocks = [[7, 8]]
        if name == "d-arrive":
            ticket = self.peer.ticket(self._peer_id(request_id))
            admission = self.state.arrive(request_id, ticket, prompt_tokens=32, identity=UNBOUND, now_s=now_s)
            demand(admission.role == "consumer", f"{request_id}: its ticket became {admission}")
            held = [other for other in self.answers.values() if other.status in {"waiting", "parked", "aborting"}]
            if self.is_shared and not held:
                for other in self.answers.values():
                    other.is_over = other.is_read  # no request held the ticket any more, so a bad end is forgotten
            answer.status = "waiting"
        elif name == "d-load":
            demand(self.state.external_tokens(request_id, computed_tokens=0) == 32, f"{request_id}: nothing to load")
            self.state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=32, now_s=now_s)
            answer.status = "parked"
        elif name in {"d-hit", "d-allocate"}:
            if name == "d-allocate":
                tokens = self.state.external_tokens(request_id, computed_tokens=0)
                demand(tokens == 0, f"{request_id}: {tokens} tokens to load although the ticket is used up")
            if name == "d-hit":
                answer.may_tell = self._may_tell(request_id)
            self.state.allocate(request_id, block_ids=blocks, new_block_ids=[[]], external_tokens=0, now_s=now_s)
            answer.status = "running"
        elif name == "d-preempt":
            self.state.preempt(request_id, now_s=now_s)
            answer.preemptions += 1
        else:
            self._end(name, request_id, answer, now_s)

    def _end(self, name: str, request_id: str, answer: Answer, now_s: float) -> None:
        decision = self.state.finish(
            request_id, reason=_REASONS[name], block_ids=[[7, 8]], computed_tokens=32, identity=UNBOUND, now_s=now_s
        )
        demand(not decision.keep_blocks, f"{request_id}: a decode keeps its blocks")
        if answer.status == "waiting":
            answer.may_tell = self._may_tell(request_id)
        if answer.status != "parked":
            answer.status = "gone"
            return
        waits = [name for name, other in self.answers.items() if name != request_id and other.status == "waiting"]
        answer.is_passed = self.is_shared and bool(waits)
        answer.is_over = not answer.is_passed
        answer.status = "aborting"

    def _workers_step(self, name: str, request_id: str, answer: Answer, now_s: float) -> None:
        if name == "d-repeat":
            self.peer.notify(self._peer_id(request_id), self.peer.readers[0], now_s)
            return
        failed = [request_id] if "bad" in answer.ranks else []
        self.state.report(sent=[], received=[request_id], failed=failed)
        answer.ranks = ["idle"] * len(answer.ranks)
        answer.is_over = answer.is_over or not (failed and answer.is_passed)
        answer.is_read = answer.is_read or not failed
        if answer.status == "aborting":
            answer.status = "gone"
            answer.is_passed = False
            answer.may_tell = self._may_tell(request_id)
        else:
            answer.status = "failing" if failed and self.fails_requests else "running"
            announced = self.state.explain(request_id, now_s=now_s)["state"]
            demand(
                announced == {"failing": "failed", "running": "local"}[answer.status],
                f"{request_id}: {announced} after its read",
            )

    def _rank_step(self, name: str, request_id: str, answer: Answer, rank: int, now_s: float) -> None:
        peer_id = self._peer_id(request_id)
        if name == "d-deliver":
            answer.in_flight -= {rank}
            self.peer.notify(peer_id, self.peer.readers[rank], now_s)
        elif name == "d-break":
            answer.ranks[rank] = "bad"
        else:
            is_intact = self.peer.is_fence_intact(peer_id)
            demand(not (is_intact and self.peer.is_freed(peer_id)), f"{request_id}: read freed blocks, unnoticed")
            answer.ranks[rank] = "ok" if is_intact else "bad"
            self._send(answer, {rank})

    def _send(self, answer: Answer, ranks: set[int]) -> None:
        answer.in_flight |= frozenset(ranks)
        answer.is_notified = True

    def obey(self, plan: StepPlan, now_s: float) -> None:
        """Let the ranks carry out a plan."""
        for order in plan.reads:
            answer = self.answers[order.request_id]
            answer.orders += 1
            waits = answer.status in {"parked", "aborting"}
            most = 2 if self.is_shared and order.is_notify_only and not waits else 1  # its read was passed on to nobody
            demand(answer.orders <= most, f"{order.request_id}: ordered {answer.orders} times")
            demand(
                order.is_reported == waits, f"{order.request_id}: reported={order.is_reported} while {answer.status}"
            )
            if order.is_notify_only:
                demand(answer.status != "parked", f"{order.request_id}: parked for nothing")
                demand(
                    answer.may_tell,
                    f"{order.request_id}: its peer is notified that no request reads, and others want to",
                )
                self._send(answer, set(range(len(answer.ranks))))
                answer.ranks = ["ok" if waits else "idle"] * len(answer.ranks)
            else:
                demand(answer.status == "parked", f"{order.request_id}: reads while {answer.status}")
                answer.ranks = ["reading"] * len(answer.ranks)
        for request_id in plan.cancels:
            answer = self.answers[request_id]
            demand(answer.status in {"aborting", "gone"}, f"{request_id}: cancelled while {answer.status}")
            if answer.status == "aborting":
                is_notified = request_id not in plan.passes
                demand(
                    is_notified != answer.is_passed,
                    f"{request_id}: its peer is notified: {is_notified}, others wait: {answer.is_passed}",
                )
            answer.ranks = ["bad" if doing == "reading" else doing for doing in answer.ranks]
        for answer in self.answers.values():
            if answer.status == "aborting":
                demand("reading" not in answer.ranks, "an aborted read goes on")
        for request_id in plan.failures:
            answer = self.answers[request_id]
            demand(answer.status == "aborting", f"{request_id}: fails while {answer.status}")
            answer.ranks = ["bad"] * len(answer.ranks)
        self._beat({request_id for beat in plan.heartbeats for request_id, _ in beat.readers}, now_s)

    def _may_tell(self, request_id: str) -> bool:
        """Return whether no other request needs the hand-over that this request gives up now."""
        others = [answer for name, answer in self.answers.items() if name != request_id] if self.is_shared else []
        return not any(answer.status in {"waiting", "parked"} or answer.is_passed for answer in others)

    def _beat(self, beaten: set[str], now_s: float) -> None:
        wanted = {self._peer_id(name) for name, answer in self.answers.items() if answer.status in _WANTS_LEASE}
        demand(beaten <= wanted, f"renewed without a reader: {beaten - wanted}")
        for request_id, answer in self.answers.items():
            if self._peer_id(request_id) in beaten and answer.status in _WANTS_LEASE:
                self.peer.renew(self._peer_id(request_id), now_s)
                answer.beaten_s = now_s
            elif answer.status in _WANTS_LEASE:
                is_due = answer.beaten_s is None or now_s - answer.beaten_s >= HEARTBEAT_S
                is_new = answer.beaten_s is None
                demand(not is_due or is_new, f"{request_id}: not renewed since {answer.beaten_s}")

    # ---- for the explorer

    def heal_step(self) -> Step | None:
        """Return the next step of a well-behaved engine, or None if it only waits."""
        for request_id, answer in self.answers.items():
            if answer.in_flight:
                return ("d-deliver", request_id, str(min(answer.in_flight)))
            if "reading" in answer.ranks:
                return ("d-read", request_id, str(answer.ranks.index("reading")))
            if answer.status == "waiting":
                return ("d-abort", request_id)
            if answer.status in {"running", "failing"}:
                return ("d-finish" if answer.status == "running" else "d-fail", request_id)
            if answer.status in {"parked", "aborting"} and set(answer.ranks) <= {"ok", "bad"}:
                return ("d-report", request_id)
        return ("d-step",) if self.state.has_work() else None

    def is_settled(self) -> bool:
        """Whether nothing is left of any request, and every peer was notified exactly once."""
        ended = [answer for answer in self.answers.values() if answer.status != "absent"]
        is_notified = (
            all(answer.orders == 1 for answer in ended) if not self.is_shared else self._is_peer_notified(ended)
        )
        return is_notified and not (
            self.state.live_count or self.state.has_work() or self.state._consumers.hand_overs._live
        )

    def _is_peer_notified(self, ended: list[Answer]) -> bool:
        """Whether some holder of the shared ticket has notified the peer, or let a read end."""
        return not ended or any(answer.is_over or answer.is_notified for answer in ended)

    def request_key(self, request_id: str, now_s: float, *, is_named: bool) -> tuple[object, ...]:
        """Return everything that determines this request's future, with times relative to now and, perhaps, ranks unnamed."""
        answer = self.answers[request_id]
        live = self.state._requests.get(request_id)  # the key must see what decides the future
        outbox = self.state._outbox
        order = outbox.orders["reads"].get(request_id)
        ranks = [(doing, rank in answer.in_flight) for rank, doing in enumerate(answer.ranks)]
        return (
            answer.status,
            answer.preemptions,
            answer.orders,
            answer.is_notified,
            ranks if is_named else sorted(ranks),
            None if answer.beaten_s is None else min(now_s - answer.beaten_s, HEARTBEAT_S),
            live and live.consumer and live.consumer.state,
            order and (order.is_notify_only, order.is_reported),
            request_id in outbox.orders["cancels"],
            request_id in outbox.orders["passes"],
            request_id in outbox.orders["failures"],
            (answer.is_over, answer.is_read, answer.is_passed, answer.may_tell),
            self._hand_over_key(live),
        )

    def _hand_over_key(self, live: Request | None) -> tuple[object, ...] | None:
        if not self.is_shared or live is None or live.consumer is None:
            return None
        hand_over = live.consumer.hand_over
        if hand_over is not None:
            return hand_over.waiting, hand_over.reading, hand_over.is_spent
        state = live.consumer.state  # an only holder
        return int(state == "queued"), int(state in {"reading", "draining"}), state not in {"queued", "reading"}

    def shared_key(self, now_s: float) -> tuple[object, ...]:
        """Return the state that no single request owns: when the peer's next heartbeat is due."""
        book = self.state._consumers.heartbeats
        return tuple(sorted(max(0.0, peer.due_s - now_s) for peer in book._peers.values()))
