"""An engine that is not vLLM: PyTorch on CPU, a paged cache, prefill on two ranks and decode on one, in two processes.

    python docs/examples/torch_engine.py           # exit code 0: decode goes on as if it had computed the prompt itself
    python docs/examples/torch_engine.py --spoil   # prefill spoils a page of the last prompt: exit code 1

`kv_scheduler_state` decides (tickets, leases, reads), `kv_topology` plans, `kv_nixl_agent` reads, `kv_handshake` speaks.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
import sys
import time
from collections import Counter, deque
from functools import partial
from typing import Any

import numpy as np
import torch

import kv_scheduler_state as lifecycle
from kv_handshake import Client, Codec, Listener, LocalOffer, Outcome
from kv_nixl_agent import PeerSpec, TransferResult, TransferThread
from kv_topology import Group, Planner, RankGeometry, TransferPlan, to_document
from kv_topology.layouts import region

WORDS, WIDTH, LAYERS, HEADS, CHANNELS, PAGES, LONGEST = 97, 64, 3, 4, 16, 64, 512
FACTORS = {"model": "random-3", "dtype": "float64", "num_kv_heads": HEADS, "head_size": CHANNELS}
DIALECT = 14
# Random weights from one seed in both processes; float64, so that adding up two ranks rounds no token away.
random = partial(torch.randn, generator=torch.Generator().manual_seed(2026), dtype=torch.float64)
EMBED, PLACES, HEAD = random(WORDS, WIDTH), random(LONGEST, WIDTH), random(WIDTH, WORDS)
QKV, OUT = random(LAYERS, 3, WIDTH, HEADS, CHANNELS) / 4, random(LAYERS, HEADS, CHANNELS, WIDTH) / 4
norm = partial(torch.nn.functional.layer_norm, normalized_shape=(WIDTH,))


def next_token(ranks: list[Rank], tokens: list[int], start: int, blocks: list[int]) -> int:
    """Compute the tokens from number `start` on into the ranks' pages; return the likeliest next one."""
    places = torch.arange(start, len(tokens))
    x = EMBED[tokens[start:]] + PLACES[places]
    for layer in range(LAYERS):  # adding up the ranks' parts is the all-reduce
        x = x + sum(rank.attend(layer, norm(x), places, torch.tensor(blocks)) for rank in ranks)
    return int((norm(x[-1]) @ HEAD).argmax())


class Rank:
    """A tensor-parallel rank: its share of the heads, its pages, and the thread by which they are read and filled."""

    def __init__(self, engine: str, tp: int, number: int, block_tokens: int, axes_in_memory: tuple[int, ...]) -> None:
        self.engine, self.block_tokens, self.ends = engine, block_tokens, deque[tuple[str, str]]()
        self.heads = slice(number * HEADS // tp, (number + 1) * HEADS // tp)
        sizes, back = (PAGES, 2, HEADS // tp, block_tokens, CHANNELS), np.argsort(axes_in_memory).tolist()
        memory = [sizes[axis] for axis in axes_in_memory]
        self.caches = [torch.zeros(memory, dtype=torch.float64).permute(back) for _ in range(LAYERS)]
        regions = tuple(
            region("page kv head token channel", cache, layer=f"layer.{n}", heads=HEADS, tp_size=tp, tp_rank=number)
            for n, cache in enumerate(self.caches)
        )
        self.document = to_document(RankGeometry(tp, number, (Group("attention", block_tokens),), regions))
        self.codec, self.planner = Codec(capabilities={"nonce": "supported"}), Planner()
        self.client = Client(LocalOffer(factors=FACTORS, policy="negotiated"))
        self.state, self.leases = lifecycle.WorkerState(), lifecycle.LeaseTable()
        self.plans, self.open_reads, self.bad_reads = dict[str, TransferPlan](), Counter[str](), set[str]()
        spans = [(one.base_address, one.page_stride_bytes * PAGES, 0, one.memory_kind) for one in regions]
        self.thread = TransferThread(
            f"{engine}/{number}", spans, on_result=self.ended, on_notification=self.notified, on_quiet=self.quiet
        )
        self.thread.start()
        self.thread.call_every(0.02, self.tick)
        metadata = {
            "engine_id": engine, "agent_metadata": self.thread.agent_metadata(), "fence": self.thread.fence,
            "geometry": json.dumps(self.document).encode(), "kv_caches_base_addr": [one.base_address for one in regions],
            "device_id": 0, "num_blocks": PAGES, "block_lens": [one.page_bytes for one in regions], "kv_cache_layout": "torch",
            "block_size": block_tokens, "ssm_sizes": (0, 0), "attn_backend_name": "torch",
        }  # fmt: skip
        self.envelope = self.codec.encode_envelope(metadata, FACTORS, dialect=DIALECT, rank=(0, number))

    def attend(self, layer: int, x: Any, places: Any, blocks: Any) -> Any:
        """Write keys and values into pages, attend to all tokens so far; return this rank's part of the sum."""
        cache, heads, so_far = self.caches[layer], self.heads, torch.arange(int(places[-1]) + 1)
        q, k, v = torch.einsum("tw,nwhc->nthc", x, QKV[layer, :, :, heads])
        for kv, new in enumerate((k, v)):
            cache[blocks[places // self.block_tokens], kv, :, places % self.block_tokens] = new
        k, v = (cache[blocks[so_far // self.block_tokens], kv, :, so_far % self.block_tokens] for kv in range(2))
        scores = torch.einsum("thc,shc->hts", q, k).masked_fill(so_far > places[:, None], float("-inf"))
        return torch.einsum("hts,shc,hcw->tw", (scores / CHANNELS**0.5).softmax(-1), v, OUT[layer, heads])

    def perform(self, plan: lifecycle.StepPlan) -> None:
        """Take a step's orders. Fence words are written at once: from then on the prompt's pages may be read."""
        plan = self.state.apply(plan)
        for order in plan.fences:
            self.thread.write_fence(order.slot, order.generation)
        self.thread.call_soon(partial(self._perform, plan))  # everything below runs on the transfer thread

    def _perform(self, plan: lifecycle.StepPlan) -> None:
        self.leases.apply(plan, now_s=time.monotonic())
        for order in plan.reads:
            peer, ranks = order.ticket.peer, self.planner.target_ranks(self.document, peer_tp=order.ticket.peer.tp)
            self.client.request(
                host=peer.host, port=peer.port, engine_id=peer.engine_id, dialect=DIALECT, ranks=ranks,
                on_done=partial(self._answered, order),
            )  # fmt: skip
        for beat in plan.heartbeats:
            for key in (f"{beat.peer.engine_id}/{rank}" for rank in range(beat.peer.tp)):
                for payload in self.codec.heartbeats(beat.readers) if self.thread.agent.has_peer(key) else ():
                    self.thread.agent.send_notification(key, payload)

    def _answered(self, order: lifecycle.ReadOrder, outcome: Outcome) -> None:
        self.thread.call_soon(partial(self._met, order, outcome))  # this ran on the client's thread

    def _met(self, order: lifecycle.ReadOrder, outcome: Outcome) -> None:
        try:
            self._read(order, order.ticket.peer.engine_id, outcome)
        except Exception as error:  # noqa: BLE001 - whatever a ticket or a peer says, only its own read fails
            print(f"{order.request_id}: {outcome.message or error}", file=sys.stderr)
            self.ends.append(("failed", order.request_id))

    def _read(self, order: lifecycle.ReadOrder, engine: str, outcome: Outcome) -> None:
        if engine not in self.plans:  # peers are empty, and no plan, if the handshake failed
            documents = {rank: json.loads(peer.geometry or b"{}") for rank, peer in outcome.peers.items()}
            self.plans[engine] = plan = self.planner.plan(self.document, documents, peer_tp=order.ticket.peer.tp)
            for rank, peer in outcome.peers.items():
                rows = plan.local_rows(rank), plan.peer_rows(rank)
                self.thread.agent.add_peer(
                    PeerSpec(f"{engine}/{rank[1]}", peer.agent_metadata, *rows, fence=peer.fence)
                )
        plan, ticket, lists = self.plans[engine], order.ticket, (order.local_blocks, order.ticket.peer_blocks)
        pairs = {rank: plan.indices(rank, *lists, tokens=order.tokens) for rank in plan.producer_ranks}
        self.open_reads[order.request_id] = len(pairs)
        for rank, (local, theirs) in pairs.items():
            count, name, key = plan.reader_count(rank), f"{order.request_id}|{rank}", f"{engine}/{rank[1]}"
            done = self.codec.read_complete(ticket.peer_request_id, count, nonce=ticket.nonce, consumer=self.engine)
            self.thread.agent.post_read(name, key, local, theirs, notification=done, fence=ticket.fence)

    def ended(self, result: TransferResult) -> None:
        """Note the end of a read from one rank; pages that the wire may still write are waited for."""
        if result.outcome != "done":
            self.bad_reads.add(result.transfer_id.partition("|")[0])
        if result.is_memory_quiet:
            self.quiet(result.transfer_id)

    def quiet(self, transfer_id: str) -> None:
        """Report a request once none of its reads is left."""
        name = transfer_id.partition("|")[0]
        self.open_reads[name] -= 1
        if not self.open_reads[name]:
            self.ends.append(("failed" if name in self.bad_reads else "received", name))

    def notified(self, reader: str, payload: bytes) -> None:
        """Take in what a reader says of our leases."""
        said, now_s = self.codec.parse_notification(payload), time.monotonic()
        for name, nonce in zip(said.request_ids, said.nonces, strict=True):
            if said.kind == "heartbeat":
                self.leases.renew(name, nonce=nonce, now_s=now_s)
            elif said.kind == "read-complete":
                who: dict[str, Any] = {"reader": reader, "consumer": said.consumer, "reader_count": said.reader_count}
                self.leases.read_complete(name, nonce=nonce, now_s=now_s, **who)

    def tick(self) -> None:
        """End leases that are over: the fence word first, then the report."""
        for end in self.leases.take_ended(now_s=time.monotonic()):
            if end.fence is not None:
                self.thread.write_fence(*end.fence)
            self.ends += [("sent", end.request_id)] if end.is_reported else []


class Engine:
    """A scheduler of one request at a time, over its ranks."""

    def __init__(self, name: str, tp: int, block_tokens: int, axes_in_memory: tuple[int, ...]) -> None:
        self.block_tokens, self.free = block_tokens, list(range(PAGES))
        self.ranks = [Rank(name, tp, number, block_tokens, axes_in_memory) for number in range(tp)]
        self.listener = Listener("127.0.0.1", 0, payloads={(0, n): rank.envelope for n, rank in enumerate(self.ranks)})
        self.listener.start()
        self.state = lifecycle.SchedulerState(lifecycle.SchedulerConfig(
            name, "127.0.0.1", self.listener.port, tp=tp, groups=(lifecycle.GroupConfig("full", block_tokens),), fence_slots=64,
            fence_seed=secrets.randbits(52) + 1, nonce_seed=secrets.token_hex(16),
        ))  # fmt: skip
        self.held, self.reports, self.failed = dict[str, list[int]](), Counter[str](), set[str]()

    def step(self) -> None:
        """Hand orders down and take reports up; a request is over once every rank has reported it."""
        plan = self.state.take_step_plan(now_s=time.monotonic())
        for rank in self.ranks:
            rank.perform(plan) if not plan.is_empty else None
            while rank.ends:
                self._report(*rank.ends.popleft())

    def _report(self, kind: str, name: str) -> None:
        self.reports[name] += 1
        self.failed |= {name} if kind == "failed" else set()
        if self.reports[name] == len(self.ranks):
            kind = "failed" if name in self.failed else kind
            self.state.report(**{"sent": [], "received": [], "failed": [], kind: [name]})
            self.free += self.held.pop(name) if kind == "sent" else []

    def _start(self, name: str, prompt: list[int], params: object, room: int) -> tuple[int, list[int], Any]:
        bound = lifecycle.TextPrompt(prompt)
        now_s, count = time.monotonic(), -(-(len(prompt) + room) // self.block_tokens)
        self.state.arrive(name, params, prompt_tokens=len(prompt), identity=bound, now_s=now_s)
        external = self.state.external_tokens(name, computed_tokens=0) or 0
        self.held[name], self.free = self.free[:count], self.free[count:]
        lists = [self.held[name]]
        self.state.allocate(name, block_ids=lists, new_block_ids=lists, external_tokens=external, now_s=now_s)
        self.step()
        return external, self.held[name], bound

    def _finish(self, name: str, computed: int, identity: Any) -> object:
        known: dict[str, Any] = {
            "reason": "length",
            "block_ids": [self.held[name]],
            "computed_tokens": computed,
            "identity": identity,
        }
        decision = self.state.finish(name, now_s=time.monotonic(), **known)
        self.step()
        self.free += [] if decision.keep_blocks else self.held.pop(name)
        return decision.params

    def prefill(self, name: str, prompt: list[int], is_spoilt: bool) -> object:
        """Compute a prompt; return its ticket."""
        _, blocks, identity = self._start(name, prompt, lifecycle.prefill_request_params(), 0)
        next_token(self.ranks, prompt, 0, blocks)
        for cache in self.ranks[0].caches if is_spoilt else ():
            cache[blocks[0]].neg_()
        return self._finish(name, len(prompt), identity)

    def decode(self, name: str, prompt: list[int], ticket: object, count: int) -> tuple[int, list[int]]:
        """Return how many tokens of the prompt were read, and its continuation; what was not read is computed here."""
        external, blocks, identity = self._start(name, prompt, ticket, count)
        while external and self.reports[name] < len(self.ranks):
            self.step()
            time.sleep(0.001)
        read, tokens = 0 if name in self.failed else external, list(prompt)
        have = min(read, len(prompt) - 1)  # the last token is computed in any case: it says what comes next
        for _ in range(count):
            tokens.append(next_token(self.ranks, tokens, have, blocks))
            have = len(tokens) - 1
        self._finish(name, have, identity)
        return read, tokens[len(prompt) :]


def serve(calls: Any, *options: Any) -> None:
    """Run an engine in this process: answer the router, and step while it is silent."""
    torch.set_num_threads(1)
    engine = Engine(*options)
    while True:
        method, *words = calls.recv() if calls.poll(0.005) else ("step",)
        if method == "close":
            break
        answer = len(engine.free) if method == "free" else getattr(engine, method)(*words)
        calls.send(answer) if method != "step" else None
    for rank in engine.ranks:
        rank.client.close()
        rank.thread.close()
    engine.listener.close()


def main(options: list[str]) -> int:
    """Be the router: each prompt goes to prefill, then with its ticket to decode, then without one to decode."""
    context, engines = multiprocessing.get_context("spawn"), []
    for each in (("prefill", 2, 16, (0, 1, 2, 3, 4)), ("decode", 1, 8, (0, 3, 1, 2, 4))):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, *each)).start()
        engines.append(ours)
    call, is_same = lambda engine, *words: (engine.send(words), engine.recv())[1], True
    for number, size in enumerate((5, 33, 64)):
        prompt = [(7 * place * place + number) % WORDS for place in range(size)]
        ticket = call(engines[0], "prefill", f"p{number}", prompt, size == 64 and "--spoil" in options)
        read, continued = call(engines[1], "decode", f"d{number}", prompt, ticket, 12)
        _, alone = call(engines[1], "decode", f"a{number}", prompt, None, 12)
        is_same = is_same and (read, continued) == (size, alone)
        print(f"prompt of {size}, {read} read: {continued}\n      computed alone: {alone}")
    while call(engines[0], "free") < PAGES:
        time.sleep(0.01)
    print("the same continuation" if is_same else "ANOTHER continuation", "and every page of prefill is free again")
    for engine in engines:
        engine.send(("close",))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
