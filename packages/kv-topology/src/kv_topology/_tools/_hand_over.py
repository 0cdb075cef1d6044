"""A hand-over on paper: from the end of a prompt's prefill to its first token, plain and streamed, by measured prices.

Arithmetic over one consumer rank's plan. A plain hand-over begins when the prefill engine's answer has gone through the router.
A streamed one reads what a prefill step has computed while the next one runs.

Worked example. 100 tokens in steps of 40 at 1000 tokens a second: steps end after 40, 80 and 100 ms. 1 MB a step of 40 tokens at
0.1 GB/s takes 10 ms. With looks every 1.25 ms (a 32nd of 40 ms) and two small reads of 0.8 ms, a step's bytes are asked for
0.625 + 1.6 = 2.225 ms after its end, and posting takes 0.5 ms: the last 0.5 MB are here 2.225 + 0.5 + 5 = 7.725 ms after the
prefill's end. Plain, all 2.5 MB are read then: 12 + 2 + 25 = 39 ms, of which 12 ms are the router's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from kv_topology._estimate import CostModel

__all__ = ["HandOver", "HandOverModel", "Load", "Way", "estimate", "looks_per_step"]

Way = Literal["plain", "streamed"]
_PACE_SHARE = 1 / 32


@final
@dataclass(frozen=True, slots=True)
class HandOverModel:
    """Prices of all that a hand-over does besides moving bytes. Times in ms; measured ones are medians on two busy cores.

    Attributes:
        prefill_tokens_s: Prompt tokens a second of the prefill engine. Assumed: give your own.
        chunk_tokens: Most tokens of a prefill step. Source: vLLM 0.32's default for an API server on a GPU of 70 GiB or more.
        decode_step_ms: A step of the decode engine. Assumed: give your own.
        relay_ms: From the prefill engine's end to the decode engine's scheduler, through the demo router. Measured: 9.5 to 14.
        order_ms: From the scheduler to the posted read. Measured: 1.7 to 2.2.
        post_ms: Posting a further read. Measured: 0.3 to 0.7.
        look_ms: A small one-sided read, of progress words or of block ids. Measured: 0.8 over shared memory.
        notice_ms: From the last byte to the step that takes the request up, the fence check in it. Measured: 2.2 to 3.1.
        free_ms: From the last byte to blocks that are free in the producer's scheduler. Measured: 2.
        poll_ms: Shortest pause between looks at progress. Source: `stream_poll_s`.
        slow_poll_ms: Longest one; between them a 32nd of the time since the last change. Source: `stream_slow_poll_s`.
        peers: Engines that read from this one.
        stream_slots: Prompts that may be streamed from it at once. Source: the configuration's default.
        at_once: Hand-overs that share a rank's bandwidth.
    """

    prefill_tokens_s: float = 12_000.0
    chunk_tokens: int = 8192
    decode_step_ms: float = 15.0
    relay_ms: float = 12.0
    order_ms: float = 2.0
    post_ms: float = 0.5
    look_ms: float = 0.8
    notice_ms: float = 2.8
    free_ms: float = 2.0
    poll_ms: float = 0.5
    slow_poll_ms: float = 20.0
    peers: int = 512
    stream_slots: int = 64
    at_once: int = 1

    def wire_ms(self, cost: CostModel, load: Load) -> float:
        """Return the time that bytes and descriptors take, with others on the same wire."""
        return self.at_once * cost.direct_us(load.descriptors, load.moved_bytes) / 1e3

    def pace_ms(self, since_ms: float) -> float:
        """Return the pause between two looks so long after the last change; after 320 ms it is 10 ms."""
        return min(max(self.poll_ms, since_ms * _PACE_SHARE), self.slow_poll_ms)


@final
@dataclass(frozen=True, slots=True)
class Load:
    """Bytes and descriptors of a read."""

    moved_bytes: float
    descriptors: float

    def part(self, share: float) -> Load:
        """Return a share of it."""
        return Load(self.moved_bytes * share, self.descriptors * share)

    def plus(self, other: Load) -> Load:
        """Return both together."""
        return Load(self.moved_bytes + other.moved_bytes, self.descriptors + other.descriptors)


@final
@dataclass(frozen=True, slots=True)
class HandOver:
    """An estimated hand-over of one prompt, per rank.

    Attributes:
        way: Plain or streamed.
        wait_ms: From the prefill's end to the first token.
        first_token_ms: From the prefill's start to the first token.
        most_in_flight_bytes: The most that one read has on the wire.
        early_share: Share of the bytes that have arrived by the prefill's end.
        producer_hold_ms: From the prefill's end until the producer's blocks are free.
        consumer_hold_ms: From the reservation of the consumer's blocks to the first token.
        looks_per_s: The most one-sided reads of progress words that a producer rank is asked for in a second.
    """

    way: Way
    wait_ms: float
    first_token_ms: float
    most_in_flight_bytes: float
    early_share: float
    producer_hold_ms: float
    consumer_hold_ms: float
    looks_per_s: float


def looks_per_step(model: HandOverModel, step_ms: float) -> int:
    """Return how often a reader looks at progress words that change once in so long: a step of 10 ms at 0.5 ms takes 20 looks."""
    at_ms, looks = 0.0, 0
    while at_ms < step_ms:
        at_ms += model.pace_ms(at_ms)
        looks += 1
    return looks


def estimate(
    model: HandOverModel, cost: CostModel, load: Load, states: Load, readers: int
) -> tuple[HandOver, HandOver]:
    """Return a plain and a streamed hand-over of the cost model's prompt.

    Args:
        model: Prices and sizes of the fleet.
        cost: Prices of the wire.
        load: Reads of a rank for the prompt's tokens.
        states: Additional reads, of data that is final only at the prefill's end.
        readers: Consumer ranks of an engine that read from one producer rank.
    """
    return _plain(model, cost, load.plus(states)), _streamed(model, cost, load, states, readers)


def _prefill_ms(model: HandOverModel, cost: CostModel) -> float:
    return 1e3 * cost.prompt_tokens / model.prefill_tokens_s


def _plain(model: HandOverModel, cost: CostModel, load: Load) -> HandOver:
    arrived = model.relay_ms + model.order_ms + model.wire_ms(cost, load)
    wait = arrived + model.notice_ms + model.decode_step_ms
    return HandOver(
        "plain",
        wait_ms=wait,
        first_token_ms=_prefill_ms(model, cost) + wait,
        most_in_flight_bytes=load.moved_bytes,
        early_share=0.0,
        producer_hold_ms=arrived + model.free_ms,
        consumer_hold_ms=wait - model.relay_ms,
        looks_per_s=0.0,
    )


def _streamed(model: HandOverModel, cost: CostModel, load: Load, states: Load, readers: int) -> HandOver:
    """Return a streamed hand-over; each part is everything that is whole when the part before it has arrived."""
    tokens, chunk = cost.prompt_tokens, model.chunk_tokens
    ends = [*range(chunk, tokens, chunk), tokens]
    to_ms = 1e3 / model.prefill_tokens_s
    step_ms = min(chunk, tokens) * to_ms
    seen_after = model.pace_ms(step_ms) / 2 + 2 * model.look_ms
    prefill_ms, now_ms, begun, most, early = tokens * to_ms, 0.0, 0, 0.0, 0.0
    while begun < tokens:
        now_ms = max(now_ms, next(end for end in ends if end > begun) * to_ms + seen_after)
        stop = max(end for end in ends if end * to_ms + seen_after <= now_ms)
        part = load.part((stop - begun) / tokens)
        begun, part = stop, part.plus(states) if stop == tokens else part
        now_ms += model.post_ms + model.wire_ms(cost, part)
        most = max(most, part.moved_bytes)
        early += part.moved_bytes if now_ms <= prefill_ms else 0.0
    arrived = now_ms - prefill_ms
    wait = arrived + model.notice_ms + model.decode_step_ms
    watched = min(model.peers, model.stream_slots) * readers
    return HandOver(
        "streamed",
        wait_ms=wait,
        first_token_ms=prefill_ms + wait,
        most_in_flight_bytes=most,
        early_share=early / load.plus(states).moved_bytes,
        producer_hold_ms=arrived + model.free_ms,
        consumer_hold_ms=prefill_ms + wait,
        looks_per_s=watched * looks_per_step(model, step_ms) * 1e3 / step_ms,
    )
