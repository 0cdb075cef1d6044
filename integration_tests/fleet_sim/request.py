"""A request in an engine's host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(eq=False, slots=True)
class Request:
    """A request in an engine.

    Attributes:
        ids: Its tokens: the prompt, and what was generated.
        status: waiting, parked (a read is under way), running, held (finished, blocks leased), aborting (parked, given up), gone.
        computed: Tokens whose KV is in its blocks.
        valid: Tokens, from the first one, that were found in the prefix cache or read from a peer.
        hit: Those among them that were found in the prefix cache.
        serial: Tells it from others that had or will have the same id.
        void_since: Number of the cache reset that its KV is from before; 0 for none.
        is_producer: Whether it is to be handed over.
        hand_over_id: Id under which both engines were sent it at once; empty for a plain one.
        chunks: Chunks that were scheduled so far, those of earlier starts among them.
        is_streamed: Whether its latest read follows the peer's computation.
        early_bytes, late_bytes: Bytes that such reads moved before and after the peer had computed the last chunk.
    """

    request_id: str
    ids: list[int]
    prompt_tokens: int
    most_tokens: int
    params: object
    answer: Callable[[str, Mapping[str, object] | None, list[int]], None]
    next_id: Callable[[], int]
    status: str = "waiting"
    blocks: list[list[int]] = field(default_factory=list[list[int]])
    computed: int = 0
    scheduled: int = 0
    preemptions: int = 0
    valid: int = 0
    hit: int = 0
    serial: int = 0
    is_loaded: bool = False
    is_fresh: bool = True
    is_answered: bool = False
    void_since: int = 0
    fence: tuple[int, int] | None = None
    hand_over_id: str = ""
    is_producer: bool = False
    chunks: int = 0
    is_streamed: bool = False
    early_bytes: int = 0
    late_bytes: int = 0
